"""Runs that train at the same time: tasks, the places that run them, and the command that watches."""

"""Sharpness-aware steps inside of training frameworks, one module a framework: import the one that you use."""

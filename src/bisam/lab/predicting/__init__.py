"""Trained models that are used again: their weights, what prediction needs beside these, and predictions."""

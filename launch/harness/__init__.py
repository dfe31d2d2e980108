"""Trained policies in other people's evaluations."""

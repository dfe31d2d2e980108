"""Trained policies in use: read from a checkpoint, asked, exported."""

"""Held-out figures with intervals."""

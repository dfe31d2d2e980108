"""Trained policies behind an address that clients of OpenAI's know."""

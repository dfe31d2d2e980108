"""Hugging Face models, adapters, and the folders that they are kept in."""

"""Recipes that build the bundled offline assets: language models, a sentiment classifier, and queries."""

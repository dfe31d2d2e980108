"""Recipes of the bundled offline assets: language models, a sentiment classifier, review openings."""

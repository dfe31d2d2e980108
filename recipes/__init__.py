"""Recipes of the bundled offline assets: a language model, a sentiment classifier, review openings."""

"""Queries in, played chains out."""

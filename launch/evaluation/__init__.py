"""Evaluation of policies on held-out queries, with intervals."""

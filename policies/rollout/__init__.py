"""Generating chains of responses to queries, on one or many runners."""

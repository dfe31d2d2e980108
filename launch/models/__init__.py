"""Loading, running and exporting trained policies."""

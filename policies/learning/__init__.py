"""Rows in, better weights out. Plain PyTorch: neither Ray nor vLLM nor an environment is imported here."""

"""Private names of vLLM that we use."""

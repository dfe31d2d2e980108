"""Private names of PyTorch, transformers and PEFT that we use."""

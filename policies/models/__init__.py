"""Hugging Face models, LoRA adapters, and how they are stored."""

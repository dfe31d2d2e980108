"""In which sets of reasoning-gym may a second answer of SmolLM2-135M help? `python -m benchmarks.suite` measures it."""

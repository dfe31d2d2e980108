"""Private names of Ray, vLLM and PyTorch: every use in one file per library.

Each use says why no public name does, and what it gains. `tests/policies/test_compat.py` fails when a library changes
one of these names, so an upgrade shows here and nowhere else.
"""

"""Memory of this machine's devices, and settings with which a run fits into it."""

"""All settings of a run, and what follows from them."""

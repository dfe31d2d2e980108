"""`cory probe`: measures, before training, whether a second answer pays."""

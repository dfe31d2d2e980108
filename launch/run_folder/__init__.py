"""A run's folder, here or in a store."""

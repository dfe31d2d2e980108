"""A run's folder, local or in storage."""

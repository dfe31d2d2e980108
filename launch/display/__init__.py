"""Terminal output, tables, statistics and plots of runs."""

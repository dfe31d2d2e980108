"""Claims about CORY, judged by the results of studies."""

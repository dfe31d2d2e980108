"""One HTML page about runs and studies, which needs no network."""

"""What a terminal or a picture shows of a run."""

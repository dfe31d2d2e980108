"""What is claimed of CORY, judged by a study's results."""

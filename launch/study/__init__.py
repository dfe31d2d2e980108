"""Arms over seeds, one training after another, and what is kept of them."""

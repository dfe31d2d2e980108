"""Uses of private interfaces of libraries, one module per library; each docstring gives the reason."""

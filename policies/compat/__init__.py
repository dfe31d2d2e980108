"""What is used of libraries beside their public interfaces: a module per library, each use with its reason."""

"""The commands: one file each, with a function of the same name."""

"""What every command shares: errors, arguments, settings, output."""

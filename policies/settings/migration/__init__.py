"""Names of settings in other libraries and here: tables for error messages and for the documentation."""

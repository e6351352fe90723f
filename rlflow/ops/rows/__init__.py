"""The operators that change or join sets of rows."""

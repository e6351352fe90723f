"""Bodies that change or join sets of rows; they have all rows of what they read."""

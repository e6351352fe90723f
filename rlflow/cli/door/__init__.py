"""The Python door: compile, simulate, tune and run from a program or a notebook."""

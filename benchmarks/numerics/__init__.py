"""The cases of `vs_numerics.py`, what each side computes of them, and how they are compared."""

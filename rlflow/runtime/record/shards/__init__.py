"""A checkpoint's tensors in pieces: whose each is, where it lies, and how one is read."""

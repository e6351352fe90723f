"""One model on the ranks that share it, as costs see it."""

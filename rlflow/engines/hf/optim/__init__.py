"""Optimizers of a model that lies in one process, one file each; shards have theirs beside them."""

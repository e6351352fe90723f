"""`rlflow trace`, and what `rlflow run` is told of trackers and kernels."""

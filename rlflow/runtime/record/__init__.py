"""What a run leaves in its directory: checkpoints, metrics, spans."""

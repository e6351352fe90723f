"""DOING it: the executor, its backends, workers, checkpoints, spans and run directories."""

"""`rlflow eval`: named weights, the terms of a pipeline, their graph, what it found."""

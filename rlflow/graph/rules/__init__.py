"""What must hold of a graph before it is compiled, one file a subject."""

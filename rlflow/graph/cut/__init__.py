"""Parts of a graph that are graphs of their own: stages by themselves, edges from a record."""

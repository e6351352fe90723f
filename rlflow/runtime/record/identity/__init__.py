"""What a run depends on that lies outside of its graph: data, the source of functions, files."""

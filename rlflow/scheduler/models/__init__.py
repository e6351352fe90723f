"""What files say of a model, as far as a plan depends on it: sizes, heads, vocabularies."""

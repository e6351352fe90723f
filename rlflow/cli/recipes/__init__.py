"""`rlflow recipes` and `rlflow init`: a pipeline of one's own from a recipe, checked at once."""

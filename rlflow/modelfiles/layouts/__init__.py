"""How the layers of a model may be shared out over ranks, from its config alone."""

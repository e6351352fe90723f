"""The verifier: what must hold of a plan after each pass, one file a subject."""

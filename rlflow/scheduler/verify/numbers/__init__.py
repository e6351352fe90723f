"""Rules of the verifier on what a plan states in numbers: sizes, bytes, costs and bounds."""

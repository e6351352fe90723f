"""Results that others have published, and the plans that predict them."""

"""What is in memory when, what leaves, and when it is back."""

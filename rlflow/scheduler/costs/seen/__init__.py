"""What spans of runs say of estimates."""

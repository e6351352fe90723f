"""What a user says about a loss."""

"""What configs say of mixtures of experts, beyond their sizes."""

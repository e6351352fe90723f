"""What models see of pictures, from their files alone."""

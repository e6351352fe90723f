"""Two runs side by side: where what they have left in their directories first differs."""

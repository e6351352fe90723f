"""What an optimizer step takes besides its forward: choices of tokens, pairs, own losses."""

"""Attention by FlexAttention: masks in blocks of 128 tokens, and the kernel that reads them."""

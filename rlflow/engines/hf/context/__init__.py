"""Rows whose tokens lie apart on several ranks, and the attention between them."""

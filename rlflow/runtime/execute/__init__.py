"""One event loop for every plan: what is due, who reads what, and what must hold meanwhile."""

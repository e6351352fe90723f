"""What the devices of a run waited for: the span that released each, gaps, and their causes."""

"""`tune`: the placement with the shortest period that fits, found by a bounded search."""

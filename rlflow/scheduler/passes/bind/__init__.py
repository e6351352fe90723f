"""Pass `bind`: which instance runs each node, where, and how its rows lie there."""

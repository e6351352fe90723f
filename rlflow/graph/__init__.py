"""WHAT is computed: operators' contracts, nodes, models, placements, checks, printed forms."""

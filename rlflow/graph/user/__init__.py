"""What a user writes besides models and placements: ops, engines, schedules, dispatch."""

"""The plan as a value, and its forms: printed, saved, compared, explained."""

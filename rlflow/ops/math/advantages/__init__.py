"""Advantage estimators: `group` has those of one number a row, `token` those of one a token."""

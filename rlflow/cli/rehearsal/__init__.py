"""`rlflow rehearse`: what training holds of its devices, found without one."""

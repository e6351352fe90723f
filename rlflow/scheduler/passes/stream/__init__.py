"""Pass `stream`: chains of ops that are cut into chunks, and how many are shortest."""

"""Engines behind a socket: the client in a worker, the server in the engine's interpreter."""

"""An engine behind a socket, as the worker beside it sees it."""

"""A run as a page that answers: its data, packed, and the document that the browser opens."""

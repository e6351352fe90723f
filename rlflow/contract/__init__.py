"""What ops, engines and the runtime share: values, and what the runtime asks of an engine."""

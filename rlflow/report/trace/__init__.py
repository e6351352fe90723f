"""A run as a trace that Perfetto opens: actions, what they waited for, memory, kernels."""

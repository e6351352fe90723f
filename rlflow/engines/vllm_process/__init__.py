"""What runs in vLLM's interpreter: nothing here imports rlflow, or is imported by it."""

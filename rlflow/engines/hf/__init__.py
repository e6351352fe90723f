"""Training and rollout on unmodified Hugging Face models, whole or in shards."""

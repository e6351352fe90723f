"""Pictures of prompts: where they lie, how they are packed into a field, and some to draw."""

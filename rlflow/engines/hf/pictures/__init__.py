"""Pictures in models of transformers: read by their processors, seen in their forwards."""

"""A dress rehearsal: the worker's own code on tensors that hold no data, and the bytes it takes."""

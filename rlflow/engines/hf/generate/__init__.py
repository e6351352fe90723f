"""Generation token by token: cache, sampling, random numbers, speculative decoding."""

"""Engines: the code that holds a model and computes with it, on PyTorch.

`protocol` says what the runtime may ask of an engine and imports no torch. `models` loads
and holds a model, `train` makes updates and log-probs of it, `rollout` generates with it.
Nothing here knows a graph, a plan or an algorithm.
"""

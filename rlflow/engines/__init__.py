"""Engines: the code that holds a model and computes with it, on PyTorch.

`protocol` says what the runtime may ask of an engine and imports no torch. `models` loads
and holds a model, `train` makes updates and log-probs of it, `rollout` generates with it.
Nothing here knows a graph, a plan or an algorithm.
"""

import os

# Large tensors of a CPU in pages of 2 MB, where the system leaves that to programs: a page is
# cleared when it is first touched, and tensors as large as logits come and go all the time. Read by
# torch before it makes its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

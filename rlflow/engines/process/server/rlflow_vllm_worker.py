"""What vLLM's workers do for rlflow: load weights from memory that is shared, and score whole.

vLLM imports it in each of its worker processes, before it makes a worker, and makes `Weights` a
base class of that. It needs torch and vllm alone.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
from typing import Any

import torch
import vllm.model_executor.layers.utils as linear
from rlflow_engine_process.lent import borrowed, weights_in  # type: ignore[import-not-found]
from vllm import _custom_ops
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

# On a CPU vLLM packs the weight of a linear layer for oneDNN or AMX and forgets the weight itself:
# what is loaded later would change nothing. Without these it computes in plain torch.
_custom_ops._supports_onednn = False
linear.check_cpu_sgl_kernel = lambda n, k, dtype: False

Table = list[tuple[str, str, tuple[int, ...], int]]


def _of_all_tokens(method: Any) -> Any:
    """A sampling method whose log-probs are of all tokens, not of those that top-k and top-p keep.

    `logits` are divided by the temperature already.
    """

    def sampled(self: Any, logits: Any, generators: Any, k: Any, p: Any) -> Any:
        narrowed = k is not None or p is not None
        scores = logits.log_softmax(dim=-1, dtype=torch.float32) if narrowed else None
        tokens, kept = method(self, logits, generators, k, p)
        return tokens, scores if narrowed else kept

    return sampled


for _name in ("forward_native", "forward_cpu"):
    setattr(TopKTopPSampler, _name, _of_all_tokens(getattr(TopKTopPSampler, _name)))


class Weights:
    """Methods that a worker has besides its own."""

    model_runner: Any
    rank: int
    rlflow_memory: mmap.mmap | None = None

    def rlflow_packed(self) -> list[str]:
        """The weights that are packed away, so that none could replace them."""
        named = self.model_runner.get_model().named_parameters()
        return [name for name, parameter in named if not parameter.numel()]

    def rlflow_load(self, path: str, size: int, table: Table) -> int:
        """Load the weights of a table from a memory file; how many there are."""
        if self.rlflow_memory is None:
            descriptor = os.open(path, os.O_RDWR)
            self.rlflow_memory = mmap.mmap(descriptor, size)
            os.close(descriptor)
        memory = self.rlflow_memory
        found = [(name, _view(memory, dtype, shape, at)) for name, dtype, shape, at in table]
        self.model_runner.get_model().load_weights(iter(found))
        return len(found)

    def rlflow_take(self, bucket: Table, handles: list[bytes]) -> int:
        """Load a bucket from the memory that this rank is lent; how many weights it has.

        When this is over all of it was read: the handle of a GPU is let go of after its queue.
        """
        memory = borrowed(*pickle.loads(handles[self.rank]))  # noqa: S301
        found = weights_in(memory, bucket)
        self.model_runner.get_model().load_weights(iter(found))
        if memory.is_cuda:
            torch.cuda.current_stream(memory.device).synchronize()
        return len(bucket)


def _view(memory: mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    """A tensor that lies in a memory file."""
    kind = getattr(torch, dtype)
    flat = torch.frombuffer(memory, dtype=kind, count=math.prod(shape), offset=offset)
    return flat.view(tuple(shape))

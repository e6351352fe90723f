"""What rlflow calls of torch on GPUs only: its parameters, read where there is no GPU."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing import reductions
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from rlflow.engines.hf.forward.sequences import kernel_parameters
from rlflow.engines.reshard import ipc

pytestmark = pytest.mark.torch


def names(function):
    return list(inspect.signature(function).parameters)


def test_the_kernels_forward_takes_what_it_is_told():
    given = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert given == names(varlen_attn)[: len(given)]
    assert {"return_aux", "scale", "window_size"} <= kernel_parameters()
    assert AuxRequest(lse=True).lse


def test_the_kernels_backward_takes_its_arguments_in_this_order():
    """By place up to `unused`, the rest by name; it returns gradients of query, key and value."""
    schema = torch.ops.aten._flash_attention_backward.default._schema
    placed = [a for a in schema.arguments if not a.kwarg_only]
    assert (
        [
            "grad_out",
            "query",
            "key",
            "value",
            "out",
            "logsumexp",
            "cum_seq_q",
            "cum_seq_k",
            "max_q",
            "max_k",
            "dropout_p",
            "is_causal",
            "rng_state",
            "unused",
        ]
    ) == [a.name for a in placed]
    assert ["Tensor"] * 8 == [str(a.type) for a in placed[:8]]
    assert {"scale", "window_size_left", "window_size_right"} <= {
        a.name for a in schema.arguments if a.kwarg_only
    }
    assert 3 == len(schema.returns)


def test_memory_of_a_gpu_is_opened_by_these_arguments():
    """`lend` puts the GPU's UUID where the number of the device stands."""
    opened = names(reductions.rebuild_cuda_tensor)
    assert "storage_device" == opened[ipc.DEVICE]
    assert (
        [
            "tensor_cls",
            "tensor_size",
            "tensor_stride",
            "tensor_offset",
            "storage_cls",
            "dtype",
            "storage_device",
            "storage_handle",
            "storage_size_bytes",
            "storage_offset_bytes",
            "requires_grad",
            "ref_counter_handle",
            "ref_counter_offset",
            "event_handle",
            "event_sync_required",
        ]
    ) == opened
    assert ["cls", "manager", "handle", "size"] == names(reductions.rebuild_storage_filename)[:4]
    assert ["cls", "storage", "metadata"] == names(reductions.rebuild_tensor)[:3]


def test_sharding_has_the_options_that_are_used():
    assert {"mesh", "mp_policy"} <= set(names(fully_shard))
    assert {"param_dtype", "reduce_dtype"} <= set(names(MixedPrecisionPolicy))
    assert {"recurse", "reshard_after_forward"} <= set(names(FSDPModule.set_reshard_after_forward))
    assert "requires_all_reduce" in names(FSDPModule.set_requires_all_reduce)
    assert "requires_gradient_sync" in names(FSDPModule.set_requires_gradient_sync)
    assert "modules" in names(FSDPModule.set_modules_to_forward_prefetch)
    assert {"run_check", "shape", "stride"} <= set(names(DTensor.from_local))


@pytest.mark.parametrize(
    "name",
    [
        "CUDAGraph",
        "Event",
        "Stream",
        "cudart",
        "current_stream",
        "device_count",
        "empty_cache",
        "get_device_capability",
        "get_device_properties",
        "max_memory_allocated",
        "mem_get_info",
        "memory_allocated",
        "memory_reserved",
        "reset_peak_memory_stats",
        "set_device",
        "set_sync_debug_mode",
        "synchronize",
    ],
)
def test_cuda_is_asked_for_what_it_has(name):
    assert callable(getattr(torch.cuda, name))


def test_a_build_for_gpus_pins_the_memory_of_others():
    """`torch.cuda.cudart()` needs a GPU; what it returns does not."""
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    assert callable(torch._C._cudart.cudaHostRegister)

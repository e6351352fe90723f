"""What models and optimizers hold on a device: once while they load, nothing while they sleep."""

from __future__ import annotations

import gc

import pytest
import torch
import transformers

from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.lora import adapt
from rlflow.engines.hf.models import TorchModel
from rlflow.engines.hf.train import TrainEngine
from rlflow.graph.model import LoRA
from rlflow.runtime.rehearse.live import LiveStorages
from tests.engines.examples import Spec, rows

pytestmark = pytest.mark.torch
ADAPTERS = LoRA(rank=2, targets=("q_proj", "down_proj"))


@pytest.mark.parametrize("lora", [None, ADAPTERS], ids=["whole", "adapters"])
def test_a_device_never_holds_a_weight_twice_while_they_arrive(model_dir, lora):
    path = model_dir("qwen2")
    module = transformers.AutoModelForCausalLM.from_pretrained(path)
    adapters = None if lora is None else adapt(module, lora, 0)
    with LiveStorages("meta") as live:
        model = TorchModel(
            module, module.config, head="lm", name="m", adapters=adapters,
            device=torch.device("meta"),
        )  # fmt: skip
        held = sum(buffer.untyped_storage().nbytes() for buffer in model.buffers())
    assert model.num_bytes() <= held <= model.num_bytes() * 1.1
    assert held <= live.most <= held + 512 * len(model.buffers())
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("whole", torch.float32),
        ("whole", torch.bfloat16),
        ("adapters", torch.bfloat16),
        ("values", torch.float32),
    ],
)
def test_asleep_nothing_is_left_but_the_copies_on_the_host(model_dir, kind, dtype):
    """Storages, not tensors: a view that somebody keeps would keep all of its buffer."""
    more = {"whole": {}, "adapters": {"lora": ADAPTERS}, "values": {"head": "value"}}[kind]
    batch = rows()
    with LiveStorages("cpu") as live:
        # Made before: what the module's own buffers and the batch take is no part of it.
        model = load_model(model_dir("llama"), dtype=dtype, device="cpu", **more)
        engine = TrainEngine(model, Spec(), micro_tokens=None)
        output = "values" if kind == "values" else "log_probs"

        def loss(outputs, micro):
            return -outputs[output].sum(), {}

        result = engine.step(batch, loss, outputs=(output,), temperature=1.0, max_grad_norm=1.0)
        assert result.applied
        engine.release_gradients()
        engine.sleep_optimizer()
        model.sleep("offload")
        gc.collect()
        copies = [*model._host, *engine.optimizer._host]
        kept = sum(-(-copy.untyped_storage().nbytes() // 512) * 512 for copy in copies)
        rest = live.now - kept
    assert kept >= model.num_bytes()
    assert rest < 8192, f"{rest} bytes beside {kept} of copies"
    freed = [*model.buffers(), *engine.optimizer.state_buffers()]
    assert not any(buffer.untyped_storage().nbytes() for buffer in freed)

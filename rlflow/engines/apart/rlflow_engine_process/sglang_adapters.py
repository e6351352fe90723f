"""Adapters that SGLang adds to weights that stay: those of one version at a time, by its name.

This file knows neither rows nor how whole weights are loaded.
"""

from __future__ import annotations

import hashlib
from typing import Any

from .held import Held
from .server import Refused, Server

DOWN, UP = ".lora_A", ".lora_B"
# SGLang computes these as one layer each, and takes adapters for all of one or for none.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Adapting(Server):
    """Has the adapters of `held`, made as `adapters` say: with `rank`, `alpha` and `targets`.

    None of a model without such. `adapter` is the name of those that requests are to ask for,
    `sent` what was sent of them.
    """

    tokenizer: Any
    held: Held
    ranks: int
    adapters: dict[str, Any] | None
    adapter: str | None = None
    sent: tuple[Any, str | None] = ([], None)

    async def adapt(self, version: int) -> None:
        """Put the adapters of a version in the place of the former ones.

        No request may be left. SGLang keeps no prefixes of one for another: each that is loaded
        has a key of its own.
        """
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        if self.adapter is not None:
            former, self.adapter = UnloadLoRAAdapterReqInput(lora_name=self.adapter), None
            require(done(await self.tokenizer.unload_lora_adapter(former, None)))
        name = f"version-{version}"
        request = self.request(name)
        require(done(await self.tokenizer.load_lora_adapter_from_tensors(request, None)))
        await self.tell(str(version))
        self.adapter = name

    def request(self, name: str) -> Any:
        """What asks SGLang to load the adapters; before 0.5.18 one copy was for all ranks."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        assert self.adapters is not None
        tensors = whole_layers(dict(self.held.tensors()), int(self.adapters["rank"]))
        self.sent = piece, form = flattened(list(tensors.items()))
        payload = dict(piece)
        return fields_of(
            LoadLoRAAdapterFromTensorsReqInput,
            lora_name=name,
            config_dict={
                "peft_type": "LORA",
                "r": self.adapters["rank"],
                "lora_alpha": self.adapters["alpha"],
                "target_modules": self.adapters["targets"],
            },
            load_format=form,
            serialized_named_tensors=[
                MultiprocessingSerializer.serialize(payload) for _ in range(self.ranks)
            ],
            serialized_tensors=MultiprocessingSerializer.serialize(payload, output_str=True),
        )

    def sums(self) -> dict[str, str]:
        """The beginning of SHA-256 of every adapter that was sent, by its name in the table."""
        sent = dict(unflattened(*self.sent))
        names = [name for name, *_ in self.held.table if is_adapter(name)]
        return {name: digest(sent[f"{name}.weight"]) for name in names} if sent else {}

    async def tell(self, version: str) -> None:
        """Have SGLang say this version of what it makes from now on."""
        if not hasattr(self.tokenizer, "update_weight_version"):
            self.tokenizer.server_args.weight_version = version
            return
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        await self.tokenizer.update_weight_version(request)


def is_adapter(name: str) -> bool:
    """Whether a weight is one half of an adapter, by its name."""
    return name.endswith((DOWN, UP))


def whole_layers(weights: dict[str, Any], rank: int) -> dict[str, Any]:
    """The adapters among `weights`, by the names that SGLang has for them.

    What is computed as one layer with an adapted one, and is not adapted, gets zeros.
    """
    found = {f"{name}.weight": tensor for name, tensor in weights.items() if is_adapter(name)}
    for name in list(found):
        front, _, last = name.removesuffix(f"{DOWN}.weight").rpartition(".")
        for other in (part for group in FUSED if last in group for part in group):
            layer = f"{front}.{other}"
            weight = weights.get(f"{layer}.weight")
            if weight is None or f"{layer}{DOWN}.weight" in found:
                continue
            found[f"{layer}{DOWN}.weight"] = weight.new_zeros(rank, weight.shape[1])
            found[f"{layer}{UP}.weight"] = weight.new_zeros(weight.shape[0], rank)
    return found


def digest(tensor: Any) -> str:
    """The first 16 digits of SHA-256 over a tensor's bytes."""
    import torch

    held = tensor.contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(held).hexdigest()[:16]


def done(result: Any) -> tuple[bool, str]:
    """Whether adapters were loaded or unloaded, and what was said of it."""
    return bool(result.success), str(result.error_message)


def require(result: Any) -> None:
    """Raise Refused unless the first of a result is true."""
    if not result[0]:
        raise Refused(str(result[1]))


def fields_of(kind: Any, **values: Any) -> Any:
    """An instance of a request, of the values that this version of SGLang knows."""
    known = getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__
    return kind(**{name: value for name, value in values.items() if name in known})


def flattened(bucket: list[tuple[str, Any]]) -> tuple[Any, str | None]:
    """What is sent of some weights, and the name of its form.

    One piece of bytes with a table, where this version of SGLang has that; else the tensors.
    """
    try:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
    except ImportError:
        return [(name, tensor.clone()) for name, tensor in bucket], None
    made = FlattenedTensorBucket(named_tensors=bucket)
    piece = {"flattened_tensor": made.get_flattened_tensor(), "metadata": made.get_metadata()}
    return piece, "flattened_bucket"


def unflattened(piece: Any, form: str | None) -> list[tuple[str, Any]]:
    """The weights of which `flattened` has made something."""
    if form is None:
        return list(piece)
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    return list(FlattenedTensorBucket(**piece).reconstruct_tensors())

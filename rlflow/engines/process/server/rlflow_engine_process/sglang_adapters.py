"""Adapters that SGLang adds to weights that stay: those of one version at a time, by its name.

This file knows no rows.
"""

from __future__ import annotations

import hashlib
from typing import Any

from .held import HeldWeights
from .sglang_weights import MODEL, Holding, flattened, require_success

DOWN, UP = ".lora_A", ".lora_B"
# SGLang computes these as one layer each, and takes adapters for all of one or for none.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Adapting(Holding):
    """Adds the adapters of `halves` to the weights of `held`, which stay; of a model without, None.

    They are made as `adapters` say: with `rank`, `alpha` and `targets`. `adapter` is the name of
    those that requests are to ask for, `sent` what was sent of them. `based` says whether the
    weights below them are there.
    """

    halves: HeldWeights | None = None
    adapters: dict[str, Any]
    adapter: str | None = None
    sent: tuple[Any, str | None] = ([], None)
    based: bool

    async def do_update(self, version: int, *, of: str = MODEL, whole: bool = False) -> str:
        """Take weights from the memory file; the version that SGLang then reports.

        All of them, or where the others are in place the adapters alone, unless the `whole` is
        wanted. Until that is done no version is served.
        """
        if self.halves is None:
            return await super().do_update(version, of=of)
        if whole or not self.based:
            await super().do_update(version)
            self.based = True
        else:
            await self.idle(flush=False)
        self.version = None
        await self.adapt(version)
        self.touched += 1
        self.version = version
        return self.reported()

    async def do_sleep(self, tags: list[str]) -> None:
        """Give memory back; what lies below the adapters is then to be loaded, too."""
        self.based = self.based and "weights" not in tags
        await super().do_sleep(tags)

    async def do_checksums(self, of: str = MODEL) -> list[dict[str, str]]:
        """SGLang's own hashes, and of adapters, which it does not hash, those of what was sent."""
        return [{**rank, **self.sums()} for rank in await super().do_checksums(of)]

    async def adapt(self, version: int) -> None:
        """Put the adapters of a version in the place of the former ones.

        No request may be left. The cache need not be emptied, which takes much longer: SGLang
        finds a prefix by its tokens and by a key that is made anew whenever adapters are loaded.
        """
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        if self.adapter is not None:
            former, self.adapter = UnloadLoRAAdapterReqInput(lora_name=self.adapter), None
            require_success(done(await self.tokenizer.unload_lora_adapter(former, None)))
        name = f"version-{version}"
        request = self.request(name)
        require_success(done(await self.tokenizer.load_lora_adapter_from_tensors(request, None)))
        await self.tell(str(version))
        self.adapter = name

    def request(self, name: str) -> Any:
        """What asks SGLang to load the adapters; before 0.5.18 one copy was for all ranks."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput as Request
        from sglang.srt.utils import MultiprocessingSerializer

        assert self.halves is not None
        weights = {**dict(self.held.tensors()), **dict(self.halves.tensors())}
        tensors = whole_layers(weights, int(self.adapters["rank"]))
        self.sent = piece, form = flattened(list(tensors.items()))
        known = getattr(Request, "__struct_fields__", None) or Request.__dataclass_fields__
        if "serialized_named_tensors" in known:
            copies = [MultiprocessingSerializer.serialize(dict(piece)) for _ in range(self.ranks)]
            payload = {"serialized_named_tensors": copies}
        else:
            one = MultiprocessingSerializer.serialize(dict(piece), output_str=True)
            payload = {"serialized_tensors": one}
        return Request(
            lora_name=name,
            config_dict={
                "peft_type": "LORA",
                "r": self.adapters["rank"],
                "lora_alpha": self.adapters["alpha"],
                "target_modules": self.adapters["targets"],
            },
            load_format=form,
            **payload,
        )

    def sums(self) -> dict[str, str]:
        """The beginning of SHA-256 of every adapter that was sent, by its name in the table."""
        sent = dict(unflattened(*self.sent))
        names = [] if self.halves is None else [name for name, *_ in self.halves.table]
        return {name: digest(sent[f"{name}.weight"]) for name in names}

    async def tell(self, version: str) -> None:
        """Have SGLang say this version of what it makes from now on."""
        if not hasattr(self.tokenizer, "update_weight_version"):
            self.tokenizer.server_args.weight_version = version
            return
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        await self.tokenizer.update_weight_version(request)


def without_adapters(said: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is said of weights in memory, of those but adapters and of adapters."""
    rest = [entry for entry in said["table"] if not _is_adapter(entry[0])]
    halves = [entry for entry in said["table"] if _is_adapter(entry[0])]
    return {**said, "table": rest}, {**said, "table": halves}


def _is_adapter(name: str) -> bool:
    """Whether a weight is one half of an adapter, by its name."""
    return name.endswith((DOWN, UP))


def whole_layers(weights: dict[str, Any], rank: int) -> dict[str, Any]:
    """The adapters among `weights`, by the names that SGLang has for them.

    What is computed as one layer with an adapted one, and is not adapted, gets zeros.
    """
    found = {f"{name}.weight": tensor for name, tensor in weights.items() if _is_adapter(name)}
    for name in list(found):
        front, _, last = name.removesuffix(f"{DOWN}.weight").rpartition(".")
        for other in (part for group in FUSED if last in group for part in group):
            layer = f"{front}.{other}"
            weight = weights.get(f"{layer}.weight")
            if weight is None or f"{layer}{DOWN}.weight" in found:
                continue
            # Weights may be quantised, adapters are not.
            like = found[name]
            found[f"{layer}{DOWN}.weight"] = like.new_zeros(rank, weight.shape[1])
            found[f"{layer}{UP}.weight"] = like.new_zeros(weight.shape[0], rank)
    return found


def digest(tensor: Any) -> str:
    """The first 16 digits of SHA-256 over a tensor's bytes."""
    import torch

    held = tensor.contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(held).hexdigest()[:16]


def done(result: Any) -> tuple[bool, str]:
    """Whether adapters were loaded or unloaded, and what was said of it."""
    return bool(result.success), str(result.error_message)


def unflattened(piece: Any, form: str | None) -> list[tuple[str, Any]]:
    """The weights of which `flattened` has made something."""
    if form is None:
        return list(piece)
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    return list(FlattenedTensorBucket(**piece).reconstruct_tensors())

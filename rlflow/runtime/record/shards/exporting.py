"""A model's directory made of a checkpoint's shards, one tensor at a time.

The module is a skeleton without memory; of every tensor that its files hold the pieces are read,
joined, rounded and written before the next one is looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from rlflow.engines.hf.heads import find_stored_head, stored_names
from rlflow.engines.hf.loading import quiet_transformers
from rlflow.engines.hf.lora import DOWN, UP
from rlflow.engines.hf.models import ValueModel
from rlflow.engines.hf.weights.names import names_in_file, names_in_files, tied_names
from rlflow.engines.hf.weights.skeletons import auto, skeleton
from rlflow.engines.hf.writing import WrittenForm, files_of, valued_form
from rlflow.errors import UsageError
from rlflow.runtime.record.durable import register_file_faults, write_file
from rlflow.runtime.record.shards.reading import open_component
from rlflow.runtime.record.tensorfile import header_of, ordered

if TYPE_CHECKING:
    from rlflow.runtime.record.shards.places import StoredFile

EXPORT_POINTS = register_file_faults("export:weights")
INDEX_FILE = "model.safetensors.index.json"


def stream_model(
    source: str, spec: Mapping[str, Any], files: Sequence[StoredFile], output: Path
) -> bool:
    """Write config and weights of a trained model; False for one that is not so written.

    `source` is the directory that the run began with: with adapters its weights are read from
    there. Not so written are architectures whose files have other tensors than the module, and
    adapters on weights that were drawn.
    """
    if spec.get("lora") and spec["init"] != "pretrained":
        return False
    module = _skeleton(source, spec)
    form = None if module is None else _form(module)
    if form is None:
        return False
    names, held = form.names, module.state_dict()
    shapes = {name: torch.empty_like(held[own], device="meta") for name, own in names.items()}
    form.write(str(output), {})
    with open_component(files) as stored:
        read = _reader(module, source, spec, stored)
        shared = files_of(shapes)
        for file, inside in shared.items():
            part = {name: shapes[name] for name in inside}
            (output / file).unlink(missing_ok=True)
            write_file(output / file, _parts(part, names, read), EXPORT_POINTS)
    if len(shared) > 1:
        _write_index(output, shared, shapes)
    return True


def _skeleton(source: str, spec: Mapping[str, Any]) -> Any:
    """The module without memory; None where it has buffers that only loading it makes."""
    dtype, valued = getattr(torch, spec["dtype"]), spec["head"] == "value"
    with quiet_transformers():
        config = auto("AutoConfig").from_pretrained(source)
        read = valued and spec["init"] == "pretrained"
        head = find_stored_head(source, config, fresh=True) if read else None
        try:
            return skeleton(source, config, spec["head"], dtype, head)
        except UsageError:
            return None


def _form(module: Any) -> WrittenForm | None:
    """How a skeleton is written, by the names in its files; None where those hold other tensors."""
    if not isinstance(module, ValueModel):
        names = names_in_files(module)
        return (
            None if names is None else WrittenForm(module=module, names=names, architectures=None)
        )
    form = valued_form(module)
    names = names_in_files(form.module)
    if names is None:
        return None
    of_files = {file: form.names.get(own) for file, own in names.items()}
    beside = form.names.keys() - names.values()  # A head that the module itself does not have.
    of_files |= {name: form.names[name] for name in beside}
    known = {name: own for name, own in of_files.items() if own is not None}
    return replace(form, names=known) if len(known) == len(of_files) else None


def _reader(
    module: Any, source: str, spec: Mapping[str, Any], stored: Mapping[str, Any]
) -> Callable[[str], Tensor]:
    """What reads one tensor by the module's name, in its dtype."""
    dtype, lora = getattr(torch, spec["dtype"]), spec.get("lora")
    scale = lora["alpha"] / lora["rank"] if lora else 0.0
    files = stored_names(source) if lora else {}
    tied, held = tied_names(module), module.state_dict()
    inner = getattr(module, "body", module)

    def base(name: str) -> Tensor:
        key = next(key for key in names_in_file(tied[name], inner) if key in files)
        with safe_open(files[key], framework="pt") as opened:
            found: Tensor = opened.get_tensor(key)
        return found.to(dtype)

    def read(name: str) -> Tensor:
        if name in stored:
            found: Tensor = stored[name][...]
            return found.to(dtype)
        if name not in tied:
            buffer: Tensor = held[name]
            return buffer
        weight = base(name)
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or layer + DOWN not in stored:
            return weight
        wide = torch.promote_types(dtype, torch.float32)
        down, up = (stored[layer + part][...].to(dtype).to(wide) for part in (DOWN, UP))
        merged: Tensor = (weight.to(wide) + scale * (up @ down)).to(dtype)
        return merged

    return read


def _parts(
    shapes: Mapping[str, Tensor], names: Mapping[str, str], read: Callable[[str], Tensor]
) -> Iterator[bytes | memoryview]:
    """The bytes of one file, a tensor at a time."""
    header, _ = header_of("model", shapes)
    yield header
    for name, shape in ordered(shapes):
        tensor = read(names[name])
        assert (tensor.shape, tensor.dtype) == (shape.shape, shape.dtype), name
        yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        del tensor


def _write_index(
    output: Path, shared: Mapping[str, Sequence[str]], shapes: Mapping[str, Tensor]
) -> None:
    size = sum(tensor.numel() * tensor.element_size() for tensor in shapes.values())
    where = {name: file for file, names in shared.items() for name in names}
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2)
    (output / INDEX_FILE).write_text(text + "\n")

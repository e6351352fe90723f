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
from rlflow.engines.hf.weights.names import may_be_turned, names_in_file, stored_buffers, tied_names
from rlflow.engines.hf.weights.parts import StoredPart, parts_in_files, whole_part
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
    there, and so are parts that are frozen. Not so written are architectures whose files have other
    tensors than the module, and models trained in part whose weights were drawn.
    """
    if (spec.get("lora") or spec.get("freeze")) and spec["init"] != "pretrained":
        return False
    module = _skeleton(source, spec)
    found = None if module is None else _form(module)
    if found is None:
        return False
    form, parts = found
    held = module.state_dict()
    shapes = {
        name: torch.empty(part.shape, dtype=held[part.own].dtype, device="meta")
        for name, part in parts.items()
    }
    form.write(str(output), {})
    with open_component(files) as stored:
        read = _reader(module, source, spec, stored)
        shared = files_of(shapes)
        for file, inside in shared.items():
            part = {name: shapes[name] for name in inside}
            (output / file).unlink(missing_ok=True)
            write_file(output / file, _parts(part, parts, read), EXPORT_POINTS)
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
            module = skeleton(source, config, spec["head"], dtype, head)
        except UsageError:
            return None
    # Buffers that a run has changed are in its checkpoint, others in the files that it began with.
    return module


def _form(module: Any) -> tuple[WrittenForm, dict[str, StoredPart]] | None:
    """How a skeleton is written, and which parts of its tensors are those of its files.

    None where files have tensors that are no parts of the skeleton's.
    """
    if not isinstance(module, ValueModel):
        parts = parts_in_files(module)
        if parts is None:
            return None
        own = {name: part.own for name, part in parts.items()}
        return WrittenForm(module=module, names=own, architectures=None), parts
    form = valued_form(module)
    parts = parts_in_files(form.module)
    if parts is None:
        return None
    found = {
        file: replace(part, own=form.names[part.own])
        for file, part in parts.items()
        if part.own in form.names
    }
    # A head that the module itself does not have.
    beside = form.names.keys() - {part.own for part in parts.values()}
    held = module.state_dict()
    found |= {name: whole_part(form.names[name], held[form.names[name]]) for name in beside}
    return (form, found) if len(found) == len(parts) + len(beside) else None


def _reader(
    module: Any, source: str, spec: Mapping[str, Any], stored: Mapping[str, Any]
) -> Callable[[str, StoredPart], Tensor]:
    """What reads a tensor of the files that are written, by its name and part, in its dtype."""
    dtype, lora = getattr(torch, spec["dtype"]), spec.get("lora")
    scale = lora["alpha"] / lora["rank"] if lora else 0.0
    buffers = stored_buffers(module)
    kept = lora or spec.get("freeze")
    files = stored_names(source) if kept or (buffers and spec["init"] == "pretrained") else {}
    tied, inner = tied_names(module), getattr(module, "body", module)
    held = module.state_dict()

    def base(name: str, part: StoredPart) -> Tensor:
        own = tied.get(part.own, [part.own])
        whole = next((key for key in names_in_file(own, inner) if key in files), None)
        key = whole or next(key for key in names_in_file([name], inner) if key in files)
        with safe_open(files[key], framework="pt") as opened:
            lies = opened.get_slice(key)
            if may_be_turned(part.own, module) and tuple(lies.get_shape()) != part.shape:
                found: Tensor = lies[...].transpose(-1, -2)
            else:
                found = lies[part.slices if whole else ...]
        return found.reshape(part.shape).to(held[part.own].dtype)

    def read(name: str, part: StoredPart) -> Tensor:
        if part.own in buffers and part.own not in stored:
            drawn: Tensor = held[part.own]
            return base(name, part) if files else drawn
        if part.own in stored:
            found: Tensor = stored[part.own][part.slices]
            return found.reshape(part.shape).to(dtype)
        weight = base(name, part)
        layer, _, kind = part.own.rpartition(".")
        if kind != "weight" or layer + DOWN not in stored:
            return weight
        wide = torch.promote_types(dtype, torch.float32)
        down, up = (stored[layer + leaf][...].to(dtype).to(wide) for leaf in (DOWN, UP))
        merged: Tensor = (weight.to(wide) + scale * (up @ down)).to(dtype)
        return merged

    return read


def _parts(
    shapes: Mapping[str, Tensor],
    parts: Mapping[str, StoredPart],
    read: Callable[[str, StoredPart], Tensor],
) -> Iterator[bytes | memoryview]:
    """The bytes of one file, a tensor at a time."""
    header, _ = header_of("model", shapes)
    yield header
    for name, shape in ordered(shapes):
        tensor = read(name, parts[name])
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

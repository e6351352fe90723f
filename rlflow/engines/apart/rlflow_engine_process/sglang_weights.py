"""Weights and memory of SGLang: updates, sleeps, wakes and hashes.

This file knows no rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from .held import Held
from .server import BEAT_SECONDS, Entry, Refused, Server

FLUSH_SECONDS = 30.0
UNFLUSHED = "cache was not flushed"


class Holding(Server):
    """Holds the weights of `held`, and tells of which `version` they are.

    `asleep` are the parts that have no memory: `weights`, and the pool, `kv_cache`.
    """

    tokenizer: Any
    held: Held
    ranks: int
    device: str
    version: int | None
    asleep: set[str]

    async def idle(self, *, flush: bool) -> None:
        """Wait until no request is left, then empty the cache of what old weights have made."""
        while self.live:
            await asyncio.sleep(BEAT_SECONDS)
        if "kv_cache" in self.asleep or not flush:
            return
        end = time.monotonic() + FLUSH_SECONDS
        while not (flushed := await self.tokenizer.flush_cache()).success:
            if time.monotonic() > end:
                raise Refused(f"the cache was not flushed: {getattr(flushed, 'message', '')}")
            await asyncio.sleep(0.005)

    async def do_update(self, version: int) -> str:
        """Take all weights from the memory file; the version that SGLang then reports.

        Until that is done no version is served. SGLang without sessions wants an empty cache.
        """
        await self.idle(flush=not hasattr(self.tokenizer, "begin_weight_update"))
        self.version = None
        buckets = self.held.buckets()
        async with self.session():
            for number, bucket in enumerate(buckets, 1):
                await self.load(bucket, str(version), last=number == len(buckets))
                self.touched += 1
        self.version = version
        return self.reported()

    def reported(self) -> str:
        """The version of its weights that SGLang tells."""
        if hasattr(self.tokenizer, "config_value"):
            return str(self.tokenizer.config_value("weight_version"))
        return str(self.tokenizer.server_args.weight_version)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """A session of weight updates, in versions of SGLang that have such."""
        if not hasattr(self.tokenizer, "begin_weight_update"):
            yield
            return
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        require(await self.tokenizer.begin_weight_update(BeginWeightUpdateReqInput(), None))
        try:
            yield
        finally:
            ended = await self.tokenizer.end_weight_update(EndWeightUpdateReqInput(), None)
        require(ended)

    async def load(self, bucket: list[Entry], version: str, *, last: bool) -> None:
        """Have SGLang load some weights; again while it still holds a batch, which is soon over."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        end, done = time.monotonic() + FLUSH_SECONDS, (False, UNFLUSHED)
        while not done[0] and UNFLUSHED in str(done[1]) and time.monotonic() < end:
            payload, form = flattened(list(self.held.tensors(bucket)))
            copies = [MultiprocessingSerializer.serialize(payload) for _ in range(self.ranks)]
            request = fields_of(
                UpdateWeightsFromTensorReqInput,
                serialized_named_tensors=copies,
                load_format=form,
                flush_cache=last and "kv_cache" not in self.asleep,
                weight_version=version if last else None,
            )
            done = await self.tokenizer.update_weights_from_tensor(request, None)
        require(done)

    async def do_sleep(self, tags: list[str]) -> None:
        """Give memory back: of `weights`, or of the pool, `kv_cache`."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self.idle(flush=True)
        if "weights" in tags:
            self.version = None
        if wanted := [tag for tag in tags if tag not in self.asleep]:
            request = ReleaseMemoryOccupationReqInput(tags=wanted)
            await self.tokenizer.release_memory_occupation(request, None)
            self.asleep.update(wanted)

    async def do_wake(self, tags: list[str]) -> None:
        """Take memory again; weights are then to be loaded."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if wanted := [tag for tag in tags if tag in self.asleep]:
            request = ResumeMemoryOccupationReqInput(tags=wanted)
            await self.tokenizer.resume_memory_occupation(request, None)
            self.asleep.difference_update(wanted)

    async def do_checksums(self) -> list[dict[str, str]]:
        """SGLang's own hashes of the weights that it holds, by its names, of every rank."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        found = await self.tokenizer.check_weights(CheckWeightsReqInput(action="checksum"), None)
        require(found)
        return [dict(rank["checksums"]) for rank in found[2]]

    async def do_hashes(self, layout: dict[str, tuple[list[str], int]]) -> dict[str, str]:
        """The same hashes of the memory file: of weights one after the other, zeros behind."""
        import torch
        from sglang.srt.managers.mm_utils import tensor_hash

        held, made = dict(self.held.tensors()), {}
        for name, (parts, extra) in layout.items():
            whole = torch.cat([held[part].to(self.device) for part in parts])
            padded = torch.cat([whole, whole.new_zeros(extra, *whole.shape[1:])])
            made[name] = f"{tensor_hash(padded):016x}"
        return made


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

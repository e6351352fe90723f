"""Weights and memory of SGLang: updates, sleeps, wakes and hashes.

This file knows no rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from typing import Any

from .held import HeldWeights, Made
from .server import BEAT_SECONDS, Entry, Refused, Server

FLUSH_SECONDS = 30.0
UNFLUSHED = "cache was not flushed"
MODEL, DRAFT = "model", "draft"


class Holding(Server):
    """Holds the weights of `held`, and tells of which `version` they are.

    `drafted` are those of a drafter, of no version that rows tell. `asleep` are the parts that
    have no memory: `weights`, and the pool, `kv_cache`.
    """

    tokenizer: Any
    held: HeldWeights
    drafted: HeldWeights | None
    drafts: bool
    ranks: int
    device: str
    version: int | None
    asleep: set[str]

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        # Memory that the ranks see, of the bucket that they load and of the next one.
        self.buffers: list[Any] = [None, None]

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

    def of(self, part: str) -> tuple[HeldWeights, str]:
        """The memory file of the model's weights or of the drafter's, and SGLang's word for it."""
        if part == DRAFT:
            assert self.drafted is not None
            return self.drafted, "draft"
        return self.held, "target" if self.drafts else "all"

    async def do_update(self, version: int, *, of: str = MODEL) -> str:
        """Take all weights from the memory file; the version that SGLang then reports.

        Until that is done no version is served. SGLang without sessions wants an empty cache.
        Weights of the drafter leave the version as it is. While the ranks load a bucket, the next
        one is copied into the other of two buffers.
        """
        await self.idle(flush=not hasattr(self.tokenizer, "begin_weight_update"))
        served, self.version = self.version, None
        held, selector = self.of(of)
        buckets = held.buckets()
        async with self.session(selector):
            laid = self.lay(held, buckets, 0)
            try:
                for number in range(len(buckets)):
                    piece, last = await laid, number + 1 == len(buckets)
                    if not last:
                        laid = self.lay(held, buckets, number + 1)
                    told = str(version) if last and of == MODEL else None
                    await self.load(piece, selector, told, last=last)
                    self.touched += 1
            finally:
                # A copy goes on where a load was refused: the next update has its buffer.
                await asyncio.gather(laid, return_exceptions=True)
        self.version = version if of == MODEL else served
        return self.reported()

    def reported(self) -> str:
        """The version of its weights that SGLang tells."""
        if hasattr(self.tokenizer, "config_value"):
            return str(self.tokenizer.config_value("weight_version"))
        return str(self.tokenizer.server_args.weight_version)

    @contextlib.asynccontextmanager
    async def session(self, selector: str) -> AsyncIterator[None]:
        """A session of weight updates, in versions of SGLang that have such."""
        if not hasattr(self.tokenizer, "begin_weight_update"):
            yield
            return
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        begin = with_known_fields(BeginWeightUpdateReqInput, selector=selector)
        require_success(await self.tokenizer.begin_weight_update(begin, None))
        try:
            yield
        finally:
            ended = await self.tokenizer.end_weight_update(EndWeightUpdateReqInput(), None)
        require_success(ended)

    def lay(self, held: HeldWeights, buckets: list[list[Entry]], number: int) -> asyncio.Task[Any]:
        """Copy a bucket to the buffer that is its turn, in a thread beside."""
        weights = list(held.tensors(buckets[number]))
        return asyncio.create_task(asyncio.to_thread(self.shared, weights, number % 2))

    async def load(
        self, piece: tuple[Any, str | None], selector: str, version: str | None, *, last: bool
    ) -> None:
        """Have SGLang load some weights, as `shared` has made them."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        payload, form = piece

        def request() -> Any:
            copies = [MultiprocessingSerializer.serialize(payload) for _ in range(self.ranks)]
            return with_known_fields(
                UpdateWeightsFromTensorReqInput,
                serialized_named_tensors=copies,
                load_format=form,
                flush_cache=last and "kv_cache" not in self.asleep,
                weight_version=version,
                selector=selector,
            )

        await asked_once_idle(self.tokenizer.update_weights_from_tensor, request)

    def shared(self, weights: list[tuple[str, Any]], turn: int) -> tuple[Any, str | None]:
        """The same as `flattened`, in one of two buffers that the ranks share, kept for the next.

        So weights are copied once on their way, and not into pages that are new each time.
        """
        import torch

        try:
            from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
        except ImportError:
            return flattened(weights)
        shapes = [(name, tensor.to("meta")) for name, tensor in weights]
        made = FlattenedTensorBucket(named_tensors=shapes)
        table, size = made.get_metadata(), made.get_flattened_tensor().numel()
        buffer = self.buffers[turn]
        if buffer is None or buffer.numel() < size:
            fresh: Any = torch.empty(size, dtype=torch.uint8)
            buffer = self.buffers[turn] = fresh.share_memory_()
        for (_, tensor), place in zip(weights, table, strict=True):
            part = buffer[place.start_idx : place.end_idx]
            part.copy_(tensor.flatten().view(torch.uint8))
        return {"flattened_tensor": buffer[:size], "metadata": table}, "flattened_bucket"

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

    async def do_checksums(self, of: str = MODEL) -> list[dict[str, str]]:
        """SGLang's own hashes of the weights that it holds, by its names, of every rank."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        _, selector = self.of(of)
        asked = with_known_fields(CheckWeightsReqInput, action="checksum", selector=selector)
        found = await self.tokenizer.check_weights(asked, None)
        require_success(found)
        return [
            {name.removeprefix("draft."): held for name, held in rank["checksums"].items()}
            for rank in found[2]
        ]

    async def do_hashes(self, layout: dict[str, Made], of: str = MODEL) -> dict[str, str]:
        """The same hashes of the memory file: of pieces one after the other, zeros behind."""
        from sglang.srt.managers.mm_utils import tensor_hash

        held, _ = self.of(of)
        made = {name: held.joined(*pieces, self.device) for name, pieces in layout.items()}
        return {name: f"{tensor_hash(tensor):016x}" for name, tensor in made.items()}


def require_selectors() -> None:
    """Raise Refused where this SGLang updates model and drafter only together."""
    import sglang
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    if "selector" not in names_of(UpdateWeightsFromTensorReqInput):
        raise Refused(f"SGLang {sglang.__version__} gives a drafter no weights of its own")


def require_success(result: Any) -> None:
    """Raise Refused unless the first of a result is true."""
    if not result[0]:
        raise Refused(str(result[1]))


async def asked_once_idle(ask: Any, request: Callable[[], Any]) -> None:
    """Ask SGLang for an update; again while it still holds a batch, which is soon over."""
    end, done = time.monotonic() + FLUSH_SECONDS, (False, UNFLUSHED)
    while not done[0] and UNFLUSHED in str(done[1]) and time.monotonic() < end:
        done = await ask(request(), None)
    require_success(done)


def with_known_fields(kind: Any, **values: Any) -> Any:
    """An instance of a request, of the values that this version of SGLang knows."""
    return kind(**{name: value for name, value in values.items() if name in names_of(kind)})


def names_of(kind: Any) -> Any:
    """The names of the values that a request has in this version of SGLang."""
    return getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__


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

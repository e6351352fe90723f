"""Other ways of weights to SGLang than memory: files, broadcasts of their worker, lent memory.

This file knows no rows, and nothing of the worker but where it is met.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import Any

from .server import Entry, Refused
from .sglang_weights import MODEL, Holding, asked_once_idle, require_success, with_known_fields

GROUP = "rlflow"


class Lent:
    """Stands for flat bytes that a handle tells of: a rank of SGLang opens it as it reads this.

    What opens a handle is torch's own, by its name. A handle is opened once, and never here.
    """

    def __init__(self, handle: tuple[str, tuple[Any, ...]]) -> None:
        self.kind, self.arguments = handle

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        import torch
        from torch.multiprocessing import reductions

        if self.kind == "cuda":
            return reductions.rebuild_cuda_tensor, self.arguments
        *where, count = self.arguments
        named = _Standing(reductions.rebuild_storage_filename, torch.UntypedStorage, *where)
        storage = _Standing(reductions.rebuild_typed_storage, named, torch.uint8)
        return reductions.rebuild_tensor, (torch.Tensor, storage, (0, (count,), (1,), False))


class _Standing:
    """Stands for what a function of torch makes of its arguments, once it is read."""

    def __init__(self, *made: Any) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        function, *arguments = self.made
        return function, tuple(arguments)


class Receiving(Holding):
    """Takes weights from a directory, a group of which its worker is rank 0, or lent memory."""

    taking: contextlib.AsyncExitStack | None = None

    async def do_drain(self) -> None:
        """Wait until no request is left."""
        await self.idle(flush=False)

    async def do_join(self, address: str, port: int) -> None:
        """Have SGLang's ranks join the group that the worker makes."""
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        request = InitWeightsUpdateGroupReqInput(
            master_address=address,
            master_port=port,
            rank_offset=1,
            world_size=1 + self.ranks,
            group_name=GROUP,
            backend="gloo",
        )
        require_success(await self.tokenizer.init_weights_update_group(request, None))

    async def do_update(
        self,
        version: int,
        *,
        path: str | None = None,
        buckets: list[list[Entry]] | None = None,
        **more: Any,
    ) -> str:
        """Take all weights; the version that SGLang then reports. None is served until then.

        They are in the directory `path`, or the worker broadcasts them in `buckets`, or they lie
        in memory.
        """
        if path is None and buckets is None:
            return await super().do_update(version, **more)
        await self.idle(flush=not hasattr(self.tokenizer, "begin_weight_update"))
        self.version = None
        if path is not None:
            await self.from_disk(path, str(version))
        else:
            await self.from_group(buckets or [], str(version))
        self.version = version
        return self.reported()

    async def from_disk(self, path: str, version: str) -> None:
        """Have SGLang read all weights of a directory."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        def request() -> Any:
            return with_known_fields(
                UpdateWeightFromDiskReqInput,
                model_path=path,
                load_format="safetensors",
                flush_cache="kv_cache" not in self.asleep,
                weight_version=version,
            )

        await asked_once_idle(self.tokenizer.update_weights_from_disk, request)

    async def from_group(self, buckets: list[list[Entry]], version: str) -> None:
        """Have SGLang receive all weights, each bucket as one piece of bytes.

        The version, and the empty cache, come with a last request that has no weights, since
        that may be asked again.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

        receive = self.tokenizer.update_weights_from_distributed
        _, selector = self.of(MODEL)

        def request(bucket: list[Entry], **more: Any) -> Any:
            return with_known_fields(
                UpdateWeightsFromDistributedReqInput,
                names=[name for name, _, _, _ in bucket],
                dtypes=[dtype for _, dtype, _, _ in bucket],
                shapes=[list(shape) for _, _, shape, _ in bucket],
                group_name=GROUP,
                selector=selector,
                **more,
            )

        async with self.session(selector):
            for bucket in buckets:
                sent = request(bucket, flush_cache=False, load_format="flattened_bucket")
                require_success(await receive(sent, None))
                self.touched += 1
            flush = "kv_cache" not in self.asleep
            last = partial(request, [], flush_cache=flush, weight_version=version)
            await asked_once_idle(receive, last)

    async def do_open(self) -> None:
        """Wait until no request is left, and begin an update whose weights come in buckets."""
        await self.idle(flush=not hasattr(self.tokenizer, "begin_weight_update"))
        self.version = None
        _, selector = self.of(MODEL)
        self.taking = contextlib.AsyncExitStack()
        await self.taking.enter_async_context(self.session(selector))

    async def do_take(
        self, bucket: list[Entry], handles: list[tuple[str, tuple[Any, ...]]]
    ) -> None:
        """Have each rank load a bucket from the memory that its handle tells of.

        When this is over a rank has read all of it: torch waits for that where it lets go of it.
        """
        from sglang.srt.utils import MultiprocessingSerializer

        if len(handles) != self.ranks:
            raise Refused(f"{self.ranks} ranks got {len(handles)} handles")
        table = lent_table(bucket)
        pieces = ({"flattened_tensor": Lent(handle), "metadata": table} for handle in handles)
        sent = [MultiprocessingSerializer.serialize(piece) for piece in pieces]
        await self.update_from(sent, flush_cache=False, load_format="flattened_bucket")
        self.touched += 1

    async def do_shut(self, version: int) -> str:
        """End the update; the version that SGLang then reports.

        The version, and the empty cache, come with a last request that has no weights, since
        that may be asked again.
        """
        from sglang.srt.utils import MultiprocessingSerializer

        flush = "kv_cache" not in self.asleep
        empty = [MultiprocessingSerializer.serialize([]) for _ in range(self.ranks)]
        await self.update_from(empty, flush_cache=flush, weight_version=str(version))
        assert self.taking is not None, "no update has begun"
        await self.taking.aclose()
        self.version = version
        return self.reported()

    async def update_from(self, sent: list[bytes], **more: Any) -> None:
        """Have SGLang's ranks load what they are sent; the session ends where they do not."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        _, selector = self.of(MODEL)

        def request() -> Any:
            return with_known_fields(
                UpdateWeightsFromTensorReqInput,
                serialized_named_tensors=sent,
                selector=selector,
                **more,
            )

        try:
            await asked_once_idle(self.tokenizer.update_weights_from_tensor, request)
        except BaseException:
            if self.taking is not None:
                await self.taking.aclose()
            raise


def lent_table(bucket: list[Entry]) -> list[Any]:
    """Where the weights of a bucket lie, as SGLang wants it told."""
    import torch
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    made = []
    for name, dtype, shape, begin in bucket:
        kind = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        made.append(
            FlattenedTensorMetadata(
                name=name,
                shape=torch.Size(shape),
                dtype=kind,
                start_idx=begin,
                end_idx=begin + size,
                numel=size,
            )
        )
    return made

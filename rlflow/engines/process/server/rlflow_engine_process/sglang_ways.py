"""Other ways of weights to SGLang than memory: files, and broadcasts of their worker.

This file knows no rows, and nothing of the worker but where it is met.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from .server import Entry
from .sglang_weights import MODEL, Holding, asked_once_idle, require_success, with_known_fields

GROUP = "rlflow"


class Receiving(Holding):
    """Takes weights from a directory, or from a group of which its worker is rank 0."""

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

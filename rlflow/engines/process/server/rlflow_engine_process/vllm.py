"""vLLM behind a socket: an engine, its rows and its weights.

It ends its process group with vLLM's own processes. Weights are read by vLLM's workers: from the
memory file, through its name under /proc, or from memory that they are lent, bucket by bucket.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import time
from array import array
from multiprocessing.connection import Connection
from typing import Any

from .held import HeldWeights, Made
from .server import BEAT_SECONDS, Entry, Refused, Server, connected, refuse_start

FLUSH_SECONDS = 30.0
PARTS = frozenset({"weights", "kv_cache"})


class VLLMServer(Server):
    """Answers requests with an engine, on the event loop that the engine was made on."""

    def __init__(self, engine: Any, connection: Connection, start: dict[str, Any]) -> None:
        super().__init__(connection)
        self.engine = engine
        self.held = HeldWeights(start["held"])
        self.ranks = int(start["ranks"])
        self.frees = bool(start["arguments"].get("enable_sleep_mode"))
        self.version: int | None = start["version"]
        self.asleep: set[str] = set()
        self.freed: set[str] = set()

    def broken(self) -> bool:
        """Whether the engine's processes are gone."""
        return bool(self.engine.errored)

    async def prepare(self) -> dict[str, Any]:
        """What a worker wants to know of a started engine, whose weights can be replaced."""
        import torch
        import vllm

        packed = [name for rank in await self.asked("rlflow_packed") for name in rank]
        if packed:
            raise Refused(f"vLLM keeps weights packed, none can replace them: {packed[:3]}")
        if self.version is not None:
            await self.engine.update_weight_version(str(self.version))
        cache = self.engine.vllm_config.cache_config
        made = {"vllm": vllm.__version__, "torch": torch.__version__, "pid": os.getpid()}
        return {**made, "pool_tokens": (cache.num_gpu_blocks - 1) * cache.block_size}

    async def asked(self, method: str, *words: Any) -> Any:
        """What a method of vLLM's workers answers, of each rank."""
        return await self.engine.collective_rpc(method, args=words)

    async def do_generate(
        self,
        call: int,
        version: int,
        prompts: list[bytes],
        rows: list[tuple[int, int, dict[str, int]]],
        sampling: dict[str, Any],
        stream: bool,
    ) -> None:
        """Make `rows` (number, prompt, further parameters); each is sent as it ends.

        With `stream`, how many tokens each row has is reported as it grows.
        """
        if version != self.version or self.asleep:
            raise Refused(f"version {version} is wanted, {self.version} is here")
        given = [array("q", prompt).tolist() for prompt in prompts]
        self.live[call] = {f"{call:08x}.{row:08x}" for row, _, _ in rows}
        try:
            await asyncio.gather(
                *(
                    self.row(call, row, given[prompt], {**sampling, **seed}, stream)
                    for row, prompt, seed in rows
                )
            )
        finally:
            del self.live[call]
            self.aborted.discard(call)
            self.counts.pop(call, None)

    async def row(
        self, call: int, row: int, prompt: list[int], sampling: dict[str, Any], stream: bool
    ) -> None:
        """Make one row and send it: its tokens, their log-probs and why it ended."""
        tokens, scores = array("q"), array("f")
        reason, cached, versions = "abort", 0, []
        if call not in self.aborted:
            name, wanted = f"{call:08x}.{row:08x}", _parameters(sampling)
            given = {"prompt_token_ids": prompt}
            async for made in self.engine.generate(given, wanted, request_id=name):
                (piece,) = made.outputs
                tokens.extend(piece.token_ids)
                scored = zip(piece.token_ids, piece.logprobs or (), strict=True)
                scores.extend(entry[token].logprob for token, entry in scored)
                reason = piece.finish_reason or reason
                cached = made.num_cached_tokens or cached
                versions = [span_version(span) for span in piece.weight_versions or ()]
                self.touched += 1
                if stream:
                    self.counts.setdefault(call, {})[row] = len(tokens)
            self.live[call].discard(name)
        self.counts.get(call, {}).pop(row, None)
        self.send(
            {
                "id": call,
                "row": row,
                "tokens": tokens.tobytes(),
                "log_probs": scores.tobytes(),
                "reason": reason,
                "cached": cached,
                "versions": versions,
            }
        )

    async def do_abort(self) -> None:
        """End every generation; rows that have not begun come back empty.

        Asked again and again, since a request may be on its way to the scheduler.
        """
        calls = set(self.live)
        self.aborted |= calls
        while left := [name for call in calls for name in self.live.get(call, ())]:
            await self.engine.abort(left)
            await asyncio.sleep(BEAT_SECONDS)

    async def idle(self) -> None:
        """Wait until no request is left, then empty the cache of prefixes."""
        while self.live:
            await asyncio.sleep(BEAT_SECONDS)
        if self.freed:
            return
        last = time.monotonic() + FLUSH_SECONDS
        while not await self.engine.reset_prefix_cache():
            if time.monotonic() > last:
                raise Refused("the cache of prefixes was not emptied")
            await asyncio.sleep(0.005)

    async def do_update(self, version: int) -> str:
        """Take all weights from the memory file; the version that vLLM then reports.

        Until that is done no version is served.
        """
        await self.idle()
        self.version = None
        memory = f"/proc/{os.getpid()}/fd/{self.held.descriptor}"
        for bucket in self.held.buckets():
            await self.asked("rlflow_load", memory, self.held.bytes, bucket)
            self.touched += 1
        return await self.do_shut(version)

    async def do_open(self) -> None:
        """Wait until no request is left, and begin an update whose weights come in buckets."""
        await self.idle()
        self.version = None

    async def do_take(
        self, bucket: list[Entry], handles: list[tuple[str, tuple[Any, ...]]]
    ) -> None:
        """Have each rank load a bucket from the memory that its handle tells of.

        What a handle says is of torch, and travels to the ranks as bytes.
        """
        if len(handles) != self.ranks:
            raise Refused(f"{self.ranks} ranks got {len(handles)} handles")
        await self.asked("rlflow_take", bucket, [pickle.dumps(handle) for handle in handles])
        self.touched += 1

    async def do_shut(self, version: int) -> str:
        """End an update; the version that vLLM then reports."""
        await self.engine.update_weight_version(str(version))
        self.version = version
        return str(await self.engine.get_weight_version())

    async def do_sleep(self, tags: list[str]) -> None:
        """Give memory back, once weights and pool (`kv_cache`) both sleep: vLLM frees both."""
        await self.idle()
        if "weights" in tags:
            self.version = None
        self.asleep.update(tags)
        if self.frees and self.asleep >= PARTS and not self.freed:
            await self.engine.sleep(level=2)
            self.freed = set(PARTS)

    async def do_wake(self, tags: list[str]) -> None:
        """Take memory again; weights are then to be loaded."""
        if wanted := [tag for tag in tags if tag in self.freed]:
            await self.engine.wake_up(wanted)
            self.freed.difference_update(wanted)
        self.asleep.difference_update(tags)

    async def do_checksums(self) -> list[dict[str, str]]:
        """Hashes of the weights as vLLM holds them, cut short, by its names, of every rank."""
        found = await self.engine.compute_weight_checksums()
        return [
            {name.rpartition(":")[2]: text[:16] for name, text in rank.items()} for rank in found
        ]

    async def do_hashes(self, layout: dict[str, Made]) -> dict[str, str]:
        """The same hashes of the memory file: of pieces one after the other, zeros behind."""
        import torch

        made = {}
        for name, of in layout.items():
            data = self.held.joined(*of).contiguous().reshape(-1).view(torch.uint8).numpy().data
            made[name] = hashlib.sha256(data).hexdigest()[:16]
        return made


def _parameters(sampling: dict[str, Any]) -> Any:
    """The sampling parameters of vLLM, of those that a worker sends."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling["max_new_tokens"],
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=sampling["top_k"],
        seed=sampling.get("sampling_seed"),
        stop_token_ids=sampling["stop_token_ids"],
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def span_version(span: Any) -> str:
    """The version of the weights that have made some tokens of a row."""
    return str(span["version"] if isinstance(span, dict) else span.version)


async def serve(connection: Connection) -> None:
    """Start the engine that the first message describes, and answer for it."""
    start = connection.recv()
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**start["arguments"]))
        server = VLLMServer(engine, connection, start)
        facts = await server.prepare()
    except BaseException as error:
        refuse_start(connection, error)
    server.send({"ready": facts})
    await server.run()


def main() -> None:
    """Serve on the socket that this process was given."""
    asyncio.run(serve(connected()))

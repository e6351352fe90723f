"""The script of an engine process: SGLang behind a socket.

It is run by its path, in the interpreter that SGLang is installed for, and needs nothing but the
standard library, torch and sglang; it knows nothing of rlflow. It ends its process group with the
socket. Requests are dictionaries with an `id` and what to `do`; answers come in any order, each row
of a generation by itself. Weights are read from the memory file whose descriptor it inherits.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

BEAT_SECONDS = 0.05
FLUSH_SECONDS = 30.0
BUCKET_BYTES = 512 << 20
UNFLUSHED = "cache was not flushed"


class Refused(Exception):
    """SGLang did not do what it was asked; the text says why."""


def fields_of(kind: Any, **values: Any) -> Any:
    """An instance of a request, of the values that this version of SGLang knows."""
    known = getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__
    return kind(**{name: value for name, value in values.items() if name in known})


class Server:
    """Answers requests with an engine, on the engine's own event loop."""

    def __init__(self, engine: Any, connection: Connection, start: dict[str, Any]) -> None:
        self.engine = engine
        self.tokenizer = engine.tokenizer_manager
        self.connection = connection
        self.table: list[tuple[str, str, tuple[int, ...], int]] = start["table"]
        self.memory = mmap.mmap(start["memory"], start["bytes"])
        self.ranks = int(start["ranks"])
        self.device = str(start["arguments"]["device"])
        self.version: int | None = start["version"]
        self.asleep: set[str] = set()
        self.live: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.counts: dict[int, dict[int, int]] = {}
        self.touched = 0

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; the worker is gone where that fails, and so is this group."""
        try:
            self.connection.send(message)
        except OSError:
            os.killpg(os.getpgrp(), signal.SIGKILL)

    def receive(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand every request to the event loop; at the end of the socket end this group."""
        while True:
            try:
                request = self.connection.recv()
            except (EOFError, OSError):
                os.killpg(os.getpgrp(), signal.SIGKILL)
            asyncio.run_coroutine_threadsafe(self.answer(request), loop)

    async def run(self) -> None:
        """Serve until the worker is gone."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self.receive, args=(loop,), daemon=True).start()
        self.send({"ready": await self.facts()})
        await self.beat()

    async def facts(self) -> dict[str, Any]:
        """What a worker wants to know of a started engine."""
        import sglang
        import torch

        told = getattr(self.engine, "_scheduler_init_result", None)
        info = told.scheduler_infos[0] if told else self.engine.scheduler_info
        made = {"sglang": sglang.__version__, "torch": torch.__version__, "pid": os.getpid()}
        return {**made, "pool_tokens": int(info["max_total_num_tokens"])}

    async def beat(self) -> None:
        """Report what has moved since the last report, if anything has.

        SGLang hears of every running request at least each fifty tokens.
        """
        heard: tuple[float, int] = (0.0, 0)
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            seen = (float(self.tokenizer.last_receive_tstamp), self.touched)
            counts, self.counts = self.counts, {}
            if counts or seen != heard:
                heard = seen
                self.send({"progress": counts})

    async def answer(self, request: dict[str, Any]) -> None:
        """Do what is asked and send its result, or the reason why not."""
        try:
            value = await getattr(self, f"do_{request['do']}")(**request["fields"])
        except Refused as error:
            found = {"error": str(error)}
        except Exception as error:
            found = {"error": "".join(traceback.format_exception(error))}
        else:
            found = {"value": value}
        self.send({"id": request["id"], **found})

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

        Rows of one prompt wait until it is in the cache. With `stream`, how many tokens each row
        has is reported as it grows.
        """
        if version != self.version or self.asleep:
            raise Refused(f"version {version} is wanted, {self.version} is here")
        of: dict[int, list[tuple[int, dict[str, int]]]] = {}
        for row, prompt, seed in rows:
            of.setdefault(prompt, []).append((row, seed))
        self.live[call] = len(rows)
        try:
            await asyncio.gather(
                *(
                    self.prompt(call, array("q", prompts[prompt]).tolist(), made, sampling, stream)
                    for prompt, made in of.items()
                )
            )
        finally:
            del self.live[call]
            self.aborted.discard(call)
            self.counts.pop(call, None)

    async def prompt(
        self,
        call: int,
        tokens: list[int],
        rows: list[tuple[int, dict[str, int]]],
        sampling: dict[str, Any],
        stream: bool,
    ) -> None:
        """Make the rows of one prompt; several share what the cache has of it."""
        if len(rows) > 1 and call not in self.aborted:
            wanted = {**sampling, "max_new_tokens": 0}
            async for _ in self.requested(f"{call:08x}.{rows[0][0]:08x}.p", tokens, wanted):
                pass
        await asyncio.gather(
            *(self.row(call, row, tokens, {**sampling, **seed}, stream) for row, seed in rows)
        )

    async def row(
        self, call: int, row: int, tokens: list[int], sampling: dict[str, Any], stream: bool
    ) -> None:
        """Make one row and send it: its tokens, their log-probs and why it ended."""
        made: dict[str, Any] = {}
        if call not in self.aborted:
            name = f"{call:08x}.{row:08x}"
            async for made in self.requested(name, tokens, sampling, stream=stream):
                if stream:
                    count = int(made["meta_info"]["completion_tokens"])
                    self.counts.setdefault(call, {})[row] = count
        meta = made.get("meta_info", {})
        scored = meta.get("output_token_logprobs") or []
        reason = meta.get("finish_reason") or {"type": "abort"}
        self.counts.get(call, {}).pop(row, None)
        self.send(
            {
                "id": call,
                "row": row,
                "tokens": array("q", [entry[1] for entry in scored]).tobytes(),
                "log_probs": array("f", [entry[0] for entry in scored]).tobytes(),
                "reason": reason["type"],
                "cached": int(meta.get("cached_tokens") or 0),
                "versions": versions(meta),
            }
        )

    def requested(
        self, name: str, tokens: list[int], sampling: dict[str, Any], *, stream: bool = False
    ) -> Any:
        """One request to SGLang, by a name that is no beginning of another's."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            rid=name,
            input_ids=tokens,
            sampling_params=sampling,
            return_logprob=sampling["max_new_tokens"] > 0,
            stream=stream,
        )
        return self.tokenizer.generate_request(request, None)

    async def do_abort(self) -> None:
        """End every generation; rows that have not begun come back empty.

        Asked again and again, since a request may be on its way to the scheduler.
        """
        calls = set(self.live)
        self.aborted |= calls
        while calls & self.live.keys():
            self.tokenizer.abort_request(abort_all=True)
            await asyncio.sleep(BEAT_SECONDS)

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
        buckets = list(self.buckets())
        async with self.session():
            for number, bucket in enumerate(buckets, 1):
                await self.load(bucket, str(version), last=number == len(buckets))
                self.touched += 1
        self.version = version
        if hasattr(self.tokenizer, "config_value"):
            return str(self.tokenizer.config_value("weight_version"))
        return str(self.tokenizer.server_args.weight_version)

    @contextlib.asynccontextmanager
    async def session(self) -> Any:
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

    def buckets(self) -> Iterator[list[tuple[str, Any]]]:
        """The weights, views of the memory file, in lists of about equal sizes."""
        bucket: list[tuple[str, Any]] = []
        size = 0
        for name, tensor in self.weights():
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        yield bucket

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Every weight of the table, a view of the memory file."""
        import torch

        for name, dtype, shape, offset in self.table:
            kind, count = getattr(torch, dtype), math.prod(shape)
            flat = torch.frombuffer(self.memory, dtype=kind, count=count, offset=offset)
            yield name, flat.view(shape)

    async def load(self, bucket: list[tuple[str, Any]], version: str, *, last: bool) -> None:
        """Have SGLang load some weights; again while it still holds a batch, which is soon over."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        end, done = time.monotonic() + FLUSH_SECONDS, (False, UNFLUSHED)
        while not done[0] and UNFLUSHED in str(done[1]) and time.monotonic() < end:
            payload, form = flattened(bucket)
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

        held, made = dict(self.weights()), {}
        for name, (parts, extra) in layout.items():
            whole = torch.cat([held[part].to(self.device) for part in parts])
            padded = torch.cat([whole, whole.new_zeros(extra, *whole.shape[1:])])
            made[name] = f"{tensor_hash(padded):016x}"
        return made


def versions(meta: dict[str, Any]) -> list[str]:
    """The versions of the weights that have made a row: of each span of tokens, if it says so."""
    spans = [span["version"] for span in meta.get("weight_versions") or ()]
    return spans or [meta["weight_version"]] if "weight_version" in meta else spans


def require(result: Any) -> None:
    """Raise Refused unless the first of a result is true."""
    if not result[0]:
        raise Refused(str(result[1]))


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


def serve(connection: Connection) -> None:
    """Start the engine that the first message describes, and answer for it."""
    start = connection.recv()
    try:
        import sglang

        engine = sglang.Engine(**start["arguments"])
        server = Server(engine, connection, start)
    except BaseException as error:
        traceback.print_exc()
        kind = "missing" if isinstance(error, ModuleNotFoundError) else "failed"
        connection.send({kind: f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from None
    engine.loop.run_until_complete(server.run())


def main() -> None:
    """Serve on the socket whose descriptor is the first argument; keep those of the others."""
    for descriptor in sys.argv[1:]:
        os.set_inheritable(int(descriptor), False)
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]
    serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()

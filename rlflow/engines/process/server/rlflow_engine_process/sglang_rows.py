"""Generation by SGLang: rows of tokens, sent as they end.

This file knows no weights.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from typing import Any

from .server import BEAT_SECONDS, Refused, Server

# A row: its number, the number of its prompt, and parameters of its own.
Row = tuple[int, int, dict[str, int]]
# A tensor: its dtype, its shape, its bytes.
Sent = tuple[str, tuple[int, ...], bytes]
# A prompt: its tokens, and what its pictures are, as the model's processor makes that.
Prompt = tuple[list[int], dict[str, Sent]]


class Generating(Server):
    """Makes rows with the engine; `version` are the weights that it serves, None while it cannot.

    `asleep` are the parts that have no memory, `adapter` is the name of what every request asks for
    beside the weights, if anything. Calls of `routing` are told what experts tokens chose.
    """

    tokenizer: Any
    version: int | None
    asleep: set[str]
    adapter: str | None
    routing: set[int]

    async def do_generate(
        self,
        call: int,
        version: int,
        prompts: list[bytes],
        rows: list[Row],
        sampling: dict[str, Any],
        stream: bool,
        routing: bool = False,
        pictures: list[dict[str, Sent]] | None = None,
    ) -> None:
        """Make `rows`. With `stream` each is sent as it ends, and what the others have until then.

        Else all are one request, which costs less, and are sent when the last has ended. Rows
        of one prompt wait until it is in the cache. With `routing` each comes with the experts that
        its tokens chose. Tokens of the prompts stand for `pictures`, one entry a prompt.
        """
        if version != self.version or self.asleep:
            raise Refused(f"version {version} is wanted, {self.version} is here")
        seen = pictures or [{}] * len(prompts)
        wanted = sorted({number for _, number, _ in rows})
        tokens = {n: (array("q", prompts[n]).tolist(), seen[n]) for n in wanted}
        self.live[call] = {named(call, row) for row, _, _ in rows}
        make = self.one_by_one if stream else self.together
        if routing:
            self.routing.add(call)
        try:
            await make(call, tokens, rows, sampling)
        finally:
            del self.live[call]
            self.aborted.discard(call)
            self.routing.discard(call)
            self.counts.pop(call, None)

    async def together(
        self, call: int, tokens: dict[int, Prompt], rows: list[Row], sampling: dict[str, Any]
    ) -> None:
        """Make all rows by one request, after those of the prompts that several rows share."""
        shared = {number for _, number, _ in _repeated(rows)}
        await self.cached(call, {n: tokens[n] for n in sorted(shared)}, sampling)
        made: list[dict[str, Any]] = [{} for _ in rows]
        if call not in self.aborted:
            names = [named(call, row) for row, _, _ in rows]
            given = [tokens[number] for _, number, _ in rows]
            wanted = [{**sampling, **own} for _, _, own in rows]
            routing = call in self.routing
            asked = self.requested(names, given, wanted, routing=routing)
            (made,) = [answer async for answer in asked]
        for (row, _, _), answer in zip(rows, made, strict=True):
            self.send(answered(call, row, answer))

    async def cached(self, call: int, prompts: dict[int, Prompt], sampling: dict[str, Any]) -> None:
        """Have prompts read into the cache."""
        if not prompts or call in self.aborted:
            return
        names = [f"{call:08x}.p{number:08x}" for number in prompts]
        wanted = [{**sampling, "max_new_tokens": 0}] * len(prompts)
        async for _ in self.requested(names, list(prompts.values()), wanted):
            pass

    async def one_by_one(
        self, call: int, tokens: dict[int, Prompt], rows: list[Row], sampling: dict[str, Any]
    ) -> None:
        """Make every row by a request of its own, those of one prompt once it was read."""
        of: dict[int, list[Row]] = {}
        for row in rows:
            of.setdefault(row[1], []).append(row)

        async def prompt(number: int, made: list[Row]) -> None:
            if len(made) > 1:
                await self.cached(call, {number: tokens[number]}, sampling)
            ways = (self.grown(call, row, tokens[number], {**sampling, **s}) for row, _, s in made)
            await asyncio.gather(*ways)

        await asyncio.gather(*(prompt(number, made) for number, made in of.items()))

    async def grown(self, call: int, row: int, prompt: Prompt, sampling: dict[str, Any]) -> None:
        """Make one row and send it; how many tokens it has is reported as it grows."""
        made: dict[str, Any] = {}
        if call not in self.aborted:
            name, routing = named(call, row), call in self.routing
            asked = self.requested(name, prompt, sampling, stream=True, routing=routing)
            async for made in asked:
                count = int(made["meta_info"]["completion_tokens"])
                self.counts.setdefault(call, {})[row] = count
        self.counts.get(call, {}).pop(row, None)
        self.send(answered(call, row, made))

    def requested(
        self,
        names: Any,
        prompts: Any,
        sampling: Any,
        *,
        stream: bool = False,
        routing: bool = False,
    ) -> Any:
        """One request to SGLang, or one of several rows, by names that begin no other's."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        several = isinstance(sampling, list)
        first = sampling[0] if several else sampling
        tokens = [each for each, _ in prompts] if several else prompts[0]
        request = GenerateReqInput(
            rid=names,
            input_ids=tokens,
            sampling_params=sampling,
            return_logprob=first["max_new_tokens"] > 0,
            stream=stream,
            lora_path=self.adapter,
            **self.shown(prompts if several else [prompts], several=several),
            **({"return_routed_experts": True} if routing else {}),
        )
        return self.tokenizer.generate_request(request, None)

    def shown(self, prompts: list[Prompt], *, several: bool) -> dict[str, Any]:
        """What a request has of pictures, if any prompt has one; for `several` a list each."""
        if not any(pictures for _, pictures in prompts):
            return {}
        found = [[processed(each)] if each else [] for _, each in prompts]
        # Of a request of several SGLang tells by the first whether each has a list of its own.
        return {"image_data": found if several else found[0]}

    async def do_abort(self) -> None:
        """End every generation; rows that have not begun come back empty.

        Asked again and again, since a request may be on its way to the scheduler.
        """
        calls = set(self.live)
        self.aborted |= calls
        while calls & self.live.keys():
            self.tokenizer.abort_request(abort_all=True)
            await asyncio.sleep(BEAT_SECONDS)

    async def do_end_rows(self, call: int, rows: list[int]) -> None:
        """End rows of a generation that have a token; they come back with what they have.

        SGLang's scheduler knows such rows, so that asking once is enough; of rows that have ended
        by themselves it hears nothing.
        """
        for row in rows:
            self.tokenizer.abort_request(rid=named(call, row))


def named(call: int, row: int) -> str:
    """The name of the request that makes a row."""
    return f"{call:08x}.{row:08x}"


def _repeated(rows: list[Row]) -> list[Row]:
    """The rows whose prompt an earlier row has as well."""
    seen: set[int] = set()
    found = []
    for row in rows:
        if row[1] in seen:
            found.append(row)
        seen.add(row[1])
    return found


def processed(pictures: dict[str, Sent]) -> dict[str, Any]:
    """The pictures of a prompt as SGLang takes what a processor has made of them."""
    import torch

    tensors = {
        name: torch.frombuffer(bytearray(held), dtype=getattr(torch, dtype)).view(shape)
        for name, (dtype, shape, held) in pictures.items()
    }
    return {"format": "processor_output", **tensors}


def answered(call: int, row: int, made: dict[str, Any]) -> dict[str, Any]:
    """The message about a row: its tokens, their log-probs, why it ended, and what was drafted."""
    meta = made.get("meta_info", {})
    scored = meta.get("output_token_logprobs") or []
    reason = meta.get("finish_reason") or {"type": "abort"}
    return {
        "id": call,
        "row": row,
        "tokens": array("q", [entry[1] for entry in scored]).tobytes(),
        "log_probs": array("f", [entry[0] for entry in scored]).tobytes(),
        "reason": reason["type"],
        "cached": int(meta.get("cached_tokens") or 0),
        "drafted": int(meta.get("spec_num_proposed_drafts") or 0),
        "accepted": int(meta.get("spec_num_correct_drafts") or 0),
        "versions": versions(meta),
        **experts(meta),
        **({"made": int(meta["completion_tokens"])} if "completion_tokens" in meta else {}),
    }


def experts(meta: dict[str, Any]) -> dict[str, bytes]:
    """The experts that tokens chose, if they are told: int32 `[tokens - 1, layers, k]` as bytes.

    Of prompt and response, and of all layers of the model. SGLang has them as base64, or as a
    tensor.
    """
    told = meta.get("routed_experts")
    if told is None:
        return {}
    return {"experts": base64.b64decode(told) if isinstance(told, str) else told.numpy().tobytes()}


def versions(meta: dict[str, Any]) -> list[str]:
    """The versions of the weights that have made a row: of each span of tokens, if it says so."""
    spans = [span["version"] for span in meta.get("weight_versions") or ()]
    return spans or [meta["weight_version"]] if "weight_version" in meta else spans

"""Experts that SGLang tells of: asked for, packed on the wire, and read as fields of rows.

The engine is a double that answers as SGLang does; none is started.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rlflow.batch import flat, lengths, ragged_rows
from rlflow.contract.values import Generation
from rlflow.engines.process.client.rows.answers import Rows
from rlflow.engines.process.server.rlflow_engine_process.sglang_rows import Generating
from rlflow.engines.process.sglang.arguments import sglang_arguments
from rlflow.engines.process.sglang.experts import with_experts
from rlflow.errors import RunError
from rlflow.graph.user.engines import SGLang
from tests.engines.sglang.test_sglang_rows import Played

pytestmark = pytest.mark.torch

LAYERS, CHOSEN = 3, 2
CONFIG = {
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": CHOSEN,
}
MODEL = SimpleNamespace(name="actor", config=SimpleNamespace(to_dict=lambda: CONFIG))
PROMPTS = [[5, 6, 7], [8, 9]]


def told(prompt, made):
    """What SGLang tells of a row: of every token but the last, int32, zeros of dense layers."""
    read = len(prompt) + made - 1
    experts = torch.arange(read * LAYERS * CHOSEN, dtype=torch.int32).view(read, LAYERS, CHOSEN)
    experts += 100 * len(prompt)
    experts[:, 0] = 0
    return experts


class Engine:
    """Answers as SGLang's tokenizer manager does where tokens go in and out."""

    def __init__(self, encode):
        self.encode = encode
        self.asked = []

    async def generate_request(self, request, _):
        self.asked.append(request)
        answers = []
        for number, prompt in enumerate(request.input_ids):
            made = number + 1
            meta = {
                "output_token_logprobs": [(-0.5, 3 + at) for at in range(made)],
                "finish_reason": {"type": "stop"},
                "weight_version": "0",
            }
            if getattr(request, "return_routed_experts", False):
                meta["routed_experts"] = self.encode(told(prompt, made))
            answers.append({"meta_info": meta})
        yield answers


def generated(monkeypatch, encode, *, routing):
    """The messages of a call for one row of each prompt, and what the engine was asked."""
    structures = ModuleType("sglang.srt.managers.io_struct")
    structures.GenerateReqInput = SimpleNamespace
    monkeypatch.setitem(sys.modules, structures.__name__, structures)
    server, sent = object.__new__(Generating), []
    server.tokenizer, server.send = Engine(encode), sent.append
    server.version, server.asleep, server.adapter = 0, set(), None
    server.live, server.aborted, server.routing, server.counts = {}, set(), set(), {}
    given = {
        "version": 0,
        "prompts": [array("q", prompt).tobytes() for prompt in PROMPTS],
        "rows": [(row, row, {}) for row in range(len(PROMPTS))],
        "sampling": {"max_new_tokens": 4},
        "stream": False,
    }
    asyncio.run(server.do_generate(7, **given, **({"routing": True} if routing else {})))
    assert not server.routing
    return sent, server.tokenizer.asked


@pytest.mark.parametrize(
    "encode",
    [lambda t: base64.b64encode(t.numpy().tobytes()).decode(), lambda t: t],
    ids=["base64", "tensor"],
)
def test_experts_of_every_token_come_with_its_row(monkeypatch, encode):
    messages, asked = generated(monkeypatch, encode, routing=True)
    rows = Rows(
        *(2, lambda wanted: Played(messages)),
        stopped=bool,
        give_up=RuntimeError,
        vocabulary=20,
        most=lambda row: row + 1,
    )
    rows.run()
    prompts = ragged_rows(PROMPTS, torch.int64)

    made = with_experts(rows.result(None), rows.experts, prompts, 1, MODEL)

    assert asked[0].return_routed_experts
    assert lengths(made.prompt_experts).tolist() == [3, 2]
    assert lengths(made.experts).tolist() == [1, 2]
    rows_told = (told(prompt, n) for prompt, n in zip(PROMPTS, (1, 2), strict=True))
    first, second = (experts[:, 1:].flatten(1) for experts in rows_told)
    none = torch.full((1, 4), -1)
    assert torch.equal(flat(made.prompt_experts).int(), torch.cat([first, second[:2]]))
    assert torch.equal(flat(made.experts).int(), torch.cat([none, second[2:], none]).int())
    assert made.experts.dtype == torch.int16


def test_nothing_is_asked_that_nobody_reads(monkeypatch):
    messages, asked = generated(monkeypatch, lambda t: t, routing=False)

    assert not hasattr(asked[0], "return_routed_experts")
    assert all("experts" not in message for message in messages)


def test_rows_of_a_piece_have_their_prompts_experts_and_those_without_tokens_none():
    prompts = ragged_rows(PROMPTS, torch.int64)
    made = Generation(
        response_tokens=ragged_rows([[], [4]], torch.int64),
        log_probs=ragged_rows([[], [-1.0]], torch.float32),
        finished=torch.tensor([False, True]),
        rows=torch.tensor([1, 2]),
    )

    found = with_experts(
        made, {1: b"", 2: told(PROMPTS[1], 1).numpy().tobytes()}, prompts, 2, MODEL
    )

    assert lengths(found.prompt_experts).tolist() == [3, 2]
    assert (flat(found.prompt_experts)[:3] == -1).all()
    assert (flat(found.prompt_experts)[3:] >= 0).all()


def test_an_engine_that_tells_nothing_is_refused():
    prompts = ragged_rows(PROMPTS[:1], torch.int64)
    made = Generation(
        response_tokens=ragged_rows([[4, 5]], torch.int64),
        log_probs=ragged_rows([[-1.0, -1.0]], torch.float32),
        finished=torch.tensor([True]),
    )

    with pytest.raises(RunError, match="E590"):
        with_experts(made, {0: b""}, prompts, 1, MODEL)


def test_the_engine_is_started_to_keep_them():
    about = {"path": "m", "dtype": torch.float32, "device": torch.device("cuda"), "ranks": 1}
    about |= {"seed": 0, "context": None}

    assert "enable_return_routed_experts" not in sglang_arguments(SGLang(), **about)
    kept = sglang_arguments(SGLang(routed_experts=True), **about)
    assert kept["enable_return_routed_experts"] is True

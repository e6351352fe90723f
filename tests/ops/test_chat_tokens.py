"""Prompts through a chat template: messages, tools, a template and a system message."""

from __future__ import annotations

import json

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.batch import split_rows
from rlflow.engines.hf.loading import load_tokenizer
from rlflow.errors import RunError
from rlflow.graph.op import Op
from rlflow.ops.bodies.common import token_rows
from rlflow.ops.body import Call
from tests.conftest import TINY

pytestmark = pytest.mark.torch

# The tiny tokenizer knows digits and signs of arithmetic: roles are written with those.
TEMPLATE = (
    "{% for message in messages %}"
    "{{ {'system': '-', 'user': '+', 'assistant': '=', 'tool': '*'}[message.role] }}"
    "{{ message.content }}"
    "{% endfor %}"
    "{% if tools %}{{ tools | length }}{{ tools[0].function.parameters.required | length }}"
    "{% endif %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


@pytest.fixture
def tokenizer():
    return load_tokenizer(str(TINY))


def spoken(tokenizer, prompt, chat):
    call = Call(
        node="made",
        op=Op(name="made", body="", inputs=(), outputs=(), per="row"),
        iteration=0,
        seed=0,
        params={"chat": chat},
        wanted=frozenset(),
        permutation=range,
        tokenizer=load_tokenizer,
    )
    (row,) = split_rows(token_rows(call, tokenizer, [prompt], True))
    return tokenizer.decode(row.tolist()).replace(" ", "")


@pytest.mark.parametrize(
    ("prompt", "chat", "text"),
    [
        ("1+1", rf.Chat(template=TEMPLATE), "+1+1="),
        ("1+1", rf.Chat(template=TEMPLATE, system="3"), "-3+1+1="),
        ("1+1", rf.Chat(template=TEMPLATE, tools=[add]), "+1+112="),
        (
            json.dumps(
                [
                    {"role": "system", "content": "5"},
                    {"role": "user", "content": "6"},
                    {"role": "assistant", "content": "7"},
                    {"role": "tool", "content": "8"},
                ]
            ),
            rf.Chat(template=TEMPLATE, system="3"),
            "-5+6=7*8=",
        ),
    ],
)
def test_a_prompt_as_the_template_writes_it(tokenizer, prompt, chat, text):
    assert text == spoken(tokenizer, prompt, chat)


def test_the_tokenizers_own_template_is_used_unless_there_is_another(tokenizer):
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert "9" == spoken(tokenizer, "9", True)
    assert "9" == spoken(tokenizer, "9", rf.Chat(system=None))
    assert "+9=" == spoken(tokenizer, "9", rf.Chat(template=TEMPLATE))


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% if %}", "{{ x.y.z }}"])
def test_a_template_that_fails_names_the_prompt(tokenizer, template):
    with pytest.raises(RunError) as caught:
        spoken(tokenizer, "9", rf.Chat(template=template))
    (finding,) = caught.value.findings
    assert ("E290", True) == (finding.code, finding.got.endswith("'9'"))
    assert finding.where.path.endswith("test_chat_tokens.py")


def test_a_chat_is_an_option_of_every_op_that_reads_prompts():
    chat = rf.Chat(template=TEMPLATE, tools=[add])

    @rf.pipeline()
    def pipeline(cfg: rf.Config) -> None:
        actor = rf.Model("actor", str(TINY), optimizer=rf.AdamW(lr=1e-4))
        prompts = ops.prompts(rf.data.arithmetic(), batch=4)
        score = lambda response: 1.0  # noqa: E731
        ops.evaluate(actor, rf.data.arithmetic(), score, every=1, max_new_tokens=2, chat=chat)
        samples = ops.rollout(actor, prompts, max_new_tokens=2, chat=chat)
        ops.update(actor, samples, loss=rf.SFTLoss())
        tokens = ops.tokenize(actor, prompts, chat=chat)
        ops.update(actor, tokens, loss=rf.SFTLoss())

    graph = pipeline.trace()
    for name in ("eval", "actor.rollout", "tokenize"):
        assert chat is graph.node(name).param("chat")
    assert "(tools add; own template)" == chat.describe()

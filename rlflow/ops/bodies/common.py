"""What several bodies need: inputs that must be there, row numbers, padding.

This file knows no operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.batch import Batch, flat, is_ragged, lengths, pad, ragged_rows
from rlflow.contract.tokenizers import Messages, Tokenizer
from rlflow.data import Chat
from rlflow.errors import Finding, RunError, error_text
from rlflow.ops.body import Call, ModelInUse

MASK = "response_mask"


def inputs_of(call: Call) -> Batch:
    """The input fields of a call whose op has inputs."""
    if call.inputs is None:
        raise AssertionError(f"node {call.node} was called without its inputs")
    return call.inputs


def model_of(call: Call) -> ModelInUse:
    """The model of a call whose op uses one."""
    if call.model is None:
        raise AssertionError(f"node {call.node} was called without its model")
    return call.model


def num_rows(batch: Batch) -> int:
    """Rows of a batch."""
    return int(batch.batch_size[0])


def row_numbers(call: Call) -> Tensor:
    """Which rows of the whole batch the inputs of a call are, int64 `[rows]`."""
    return torch.arange(num_rows(inputs_of(call))) if call.rows is None else call.rows


def total_rows(call: Call) -> int:
    """Rows of the whole batch that the inputs of a call are a part of."""
    return num_rows(inputs_of(call)) if call.rows is None else call.total


def padded_fields(batch: Batch, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Fields in the reference form: token fields `[rows, longest]`, others as they are."""
    found = {}
    for name in names:
        value = batch.get(name, None)
        if value is not None:
            found[name] = pad(flat(value), lengths(value)) if is_ragged(value) else value
    return found


def token_rows(call: Call, tokenizer: Tokenizer, texts: list[str], chat: bool) -> Tensor:
    """Prompts as ragged int64 tokens, through the chat template where asked.

    Raises RunError with the prompt where the tokenizer has no template or makes no token.
    """
    rows: list[list[int]] = []
    if chat:
        rows = [_chat_tokens(call, tokenizer, text) for text in texts]
    elif texts:
        # Masks that nobody reads would take three times as long as the tokens.
        rows = tokenizer(
            texts,
            add_special_tokens=True,
            verbose=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
    require_tokens(call, texts, rows)
    return ragged_rows(rows, torch.int64)


def require_tokens(call: Call, texts: Sequence[str], rows: Sequence[Sequence[int]]) -> None:
    """Raise RunError with the text of a prompt that has no token."""
    for text, row in zip(texts, rows, strict=True):
        if not row:
            raise RunError(
                Finding(
                    code="E633",
                    what=f"{call.node}: a prompt without a token",
                    where=call.where,
                    got=repr(text),
                )
            )


def chat_of(call: Call) -> Chat:
    """How a node's prompts go through a chat template."""
    option = call.params.get("chat", True)
    return option if isinstance(option, Chat) else Chat(declared=call.where)


def _chat_tokens(call: Call, tokenizer: Tokenizer, text: str) -> list[int]:
    encoded: Mapping[str, list[int]] = _through_template(
        call, tokenizer, chat_of(call).messages(text), {"return_dict": True}
    )
    return encoded["input_ids"]


def chat_text(call: Call, tokenizer: Tokenizer, messages: Messages) -> str:
    """Messages as the text that the chat template makes of them; raises RunError."""
    written: str = _through_template(call, tokenizer, messages, {"tokenize": False})
    return written


def _through_template(
    call: Call, tokenizer: Tokenizer, messages: Messages, form: Mapping[str, bool]
) -> Any:
    chat = chat_of(call)
    if not (chat.template or tokenizer.chat_template):
        raise RunError(
            Finding(
                code="E632",
                what=f"{call.node}: the tokenizer has no chat template",
                where=call.where,
                fix="chat=False",
            )
        )
    try:
        apply: Any = tokenizer.apply_chat_template
        return apply(
            messages,
            tools=list(chat.tools) or None,
            chat_template=chat.template,
            add_generation_prompt=True,
            **form,
        )
    except Exception as error:
        raise RunError(
            Finding(
                code="E290",
                what=f"{call.node}: the chat template does not take a prompt",
                where=chat.declared or call.where,
                got=f"{error_text(error)}\n{_said(messages)!r:.160}",
            )
        ) from error


def _said(messages: Messages) -> object:
    """What the error of a template shows: the text of the one message, or all of them."""
    return messages[0]["content"] if len(messages) == 1 else messages


def too_long(
    call: Call,
    prompts: Tensor,
    texts: list[str],
    new_tokens: int,
    context: int | None,
    numbers: Sequence[int] | None = None,
) -> None:
    """Raise RunError naming the first prompt that leaves no room for its response.

    `numbers` are the row numbers to name; places within `texts` unless given.
    """
    if context is None:
        return
    for index, size in enumerate(lengths(prompts).tolist()):
        if size + new_tokens > context:
            raise RunError(
                Finding(
                    code="E631",
                    what=f"{call.node}: a prompt is longer than the context allows",
                    where=call.where,
                    got=f"{size} prompt tokens + {new_tokens} new tokens, in row "
                    f"{index if numbers is None else numbers[index]}: "
                    f"{texts[index]!r:.120}",
                    expected=f"at most {context} tokens together",
                    fix="shorter prompts, fewer max_new_tokens, or a model with a longer context",
                )
            )

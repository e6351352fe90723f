"""Bodies of episodes: the model's next turn, and what became of the episodes in the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.batch import (
    Batch,
    flat,
    joined_rows,
    lengths,
    offsets,
    ragged,
    ragged_like,
    ragged_rows,
    select_field,
    strings,
    text,
)
from rlflow.contract.tokenizers import Tokenizer
from rlflow.contract.values import Stat
from rlflow.data import Chat
from rlflow.errors import Finding, RunError, error_text
from rlflow.ops.bodies.common import inputs_of, model_of, num_rows
from rlflow.ops.bodies.rollout import as_texts, drawn
from rlflow.ops.bodies.stats import max_of, mean_of
from rlflow.ops.body import Call, Output

SHOWN = 160
NAMED = 3


def act(call: Call) -> Output:
    """Go on with the episodes that are not over and have room for another turn.

    What they were told joins the response with mask false, log-prob 0 and the version of the
    token before it.
    """
    inputs, model, params = inputs_of(call), model_of(call), call.params
    so_far, new = inputs["response_tokens"], int(params["max_new_tokens"])
    told = told_tokens(call, model.tokenizer, inputs)
    size = lengths(so_far) + lengths(told) + new
    fits = size <= int(params["max_tokens"])
    if model.context is not None:
        fits &= size + lengths(inputs["prompt_tokens"]) <= model.context
    going, cut = ~inputs["done"] & fits, ~inputs["done"] & ~fits
    places = torch.nonzero(going).flatten()
    seen = select_field(joined_rows(inputs["prompt_tokens"], so_far), places)
    heard = select_field(told, places)
    made = model.generate(joined_rows(seen, heard), inputs["sample"][places], n=1, **drawn(params))
    said = made.response_tokens

    def grown(name: str, between: Tensor, more: Tensor) -> Tensor:
        return _at_the_end(inputs[name], joined_rows(between, more), places)

    newest = torch.full((len(flat(said)),), model.version)
    responses = strings(inputs["response"])
    for place, words in zip(places.tolist(), as_texts(model.tokenizer, said), strict=True):
        responses[place] = words
    ones, zeros = torch.ones(len(flat(said))).bool(), torch.zeros(len(flat(heard))).bool()
    quiet = ragged_like(zeros.float(), heard)
    older = select_field(inputs["version"], places)
    fields = {
        "response_tokens": grown("response_tokens", heard, said),
        "response_mask": grown("response_mask", ragged_like(zeros, heard), ragged_like(ones, said)),
        "rollout_log_probs": grown("rollout_log_probs", quiet, made.log_probs),
        "version": grown("version", _as_last(older, heard), ragged_like(newest, said)),
        "response": text(responses),
        "done": inputs["done"] | cut,
        "truncated": inputs["truncated"] | cut,
    }
    metrics = {
        "length": mean_of(lengths(said)),
        "told": mean_of(lengths(heard)),
        "acting": mean_of(going),
        "no_room": mean_of(cut),
    }
    kept = {name: value for name, value in fields.items() if name in call.wanted}
    return Output(fields=kept, rows=num_rows(inputs), metrics=metrics)


def _at_the_end(begun: Tensor, more: Tensor, places: Tensor) -> Tensor:
    """A ragged field with `more` at the end of the rows `places`."""
    sizes = torch.zeros(len(lengths(begun)), dtype=torch.int64)
    sizes[places] = lengths(more)
    return joined_rows(begun, ragged(flat(more), sizes))


def _as_last(values: Tensor, like: Tensor) -> Tensor:
    """A ragged field with the row lengths of `like` that repeats the last value of each row."""
    last = flat(values)[offsets(values)[1:] - 1]
    return ragged_like(last.repeat_interleave(lengths(like)), like)


def told_tokens(call: Call, tokenizer: Tokenizer, inputs: Batch) -> Tensor:
    """What each episode that is not over is told, ragged int64; no token for the others.

    As a message of a chat it is what the template puts between the end of the response and the
    next one; a response that was cut off is ended first.
    """
    told, done = strings(inputs["observation"]), inputs["done"].tolist()
    chat = call.params.get("chat", False)
    if chat:
        ends = _last_tokens(inputs["response_tokens"])
        template = _between(call, tokenizer, chat)
        told = [
            "" if over else template(words, ended=end == tokenizer.eos_token_id)
            for words, over, end in zip(told, done, ends, strict=True)
        ]
    words = ["" if over else words for words, over in zip(told, done, strict=True)]
    encoded = (
        tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"] if words else []
    )
    return ragged_rows(encoded, torch.int64)


def _last_tokens(tokens: Tensor) -> list[int]:
    """The last token of every row; -1 where it has none."""
    return [int(row[-1]) if len(row) else -1 for row in tokens.unbind()]


def _between(call: Call, tokenizer: Tokenizer, option: Any) -> Any:
    """A function from an observation to the text that a template puts between two responses."""
    chat = option if isinstance(option, Chat) else Chat(declared=call.where)
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def rendered(messages: Sequence[dict[str, str]], *, more: bool) -> str:
        try:
            return tokenizer.apply_chat_template(
                messages,
                tools=list(chat.tools) or None,
                chat_template=chat.template,
                add_generation_prompt=more,
                tokenize=False,
            )
        except Exception as error:
            raise _untold(call, error_text(error)) from error

    before, end = rendered(begun, more=False), tokenizer.eos_token or ""
    said, found, tail = before.rpartition(end) if end else ("", "", "")
    if not found or tail.strip():
        raise _untold(call, f"a response ends in {before[-40:]!r}, without {end!r}")

    def text_of(words: str, *, ended: bool) -> str:
        message = {"role": call.params["role"], "content": words}
        whole = rendered([*begun, message], more=True)
        if not whole.startswith(said + end):
            raise _untold(call, f"{whole!r:.{SHOWN}} does not go on from {before!r:.{SHOWN}}")
        return whole[len(said) + (len(end) if ended else 0) :]

    return text_of


def _untold(call: Call, got: str) -> RunError:
    return RunError(
        Finding(
            code="E623",
            what=f"{call.node}: the chat template has no place for what an environment answers",
            where=call.where,
            got=got,
            expected=f"a message of role {call.params['role']!r} after the assistant's, which "
            "stays as it was and ends with the EOS token",
            fix='rf.Chat(template="..."), or another role of the environment',
        )
    )


def ended(call: Call) -> Output:
    """Which episodes were cut off, and which are valid; counts them.

    Raises RunError with some of them where more failed (E624) or were cut off (E625) than may.
    """
    inputs, params = inputs_of(call), call.params
    fails = "failure" in inputs.keys()  # noqa: SIM118  a TensorDict iterates over rows
    causes = strings(inputs["failure"]) if fails else [""] * num_rows(inputs)
    failed = torch.tensor([bool(cause) for cause in causes], dtype=torch.bool)
    cut = (inputs["truncated"] | ~inputs["done"]) & ~failed
    turns = inputs["turns"].tolist()
    lost = [f"after {number} turns" for number in turns]
    _stop_at(call, "E624", "failed", failed, causes, float(params["max_failures"]))
    _stop_at(call, "E625", "did not end", cut, lost, float(params["max_truncated"]))
    valid = torch.ones(num_rows(inputs), dtype=torch.bool)
    for policy, which in ((params["failed"], failed), (params["truncated"], cut)):
        if policy != "keep":
            valid &= ~which
        if policy == "drop_group":
            valid &= ~torch.isin(inputs["group"], inputs["group"][which])
    mask = flat(inputs["response_mask"])
    metrics: dict[str, float | Stat] = {
        "turns": mean_of(inputs["turns"]),
        "turns_max": max_of(inputs["turns"]),
        "reward": mean_of(inputs["reward"][valid]),
        "truncated": mean_of(cut),
        "told": mean_of(~mask),
        "length": mean_of(lengths(inputs["response_mask"])),
    }
    metrics |= {"failed": mean_of(failed)} if fails else {}
    metrics |= {"dropped": mean_of(~valid)} if "valid" in call.outputs else {}
    fields = {"truncated": cut, "valid": valid}
    kept = {name: value for name, value in fields.items() if name in call.wanted}
    return Output(fields=kept, rows=num_rows(inputs), metrics=metrics)


def _stop_at(
    call: Call, code: str, what: str, which: Tensor, why: Sequence[str], most: float
) -> None:
    """Raise RunError where more than the share `most` of the episodes are such."""
    places = torch.nonzero(which).flatten().tolist()
    if len(places) <= most * len(which):
        return
    inputs = inputs_of(call)
    names = [name for name in ("prompt", "response") if name in inputs.keys()]  # noqa: SIM118
    columns = {name: strings(inputs[name]) for name in names}
    numbers = inputs["sample"].tolist()
    shown = []
    for place in places[:NAMED]:
        shown.append(f"episode {numbers[place]}: {why[place]}")
        shown += [f"  {name}: {column[place]!r:.{SHOWN}}" for name, column in columns.items()]
    if len(places) > NAMED:
        rest = ", ".join(str(numbers[place]) for place in places[NAMED:][:SHOWN])
        shown.append(f"and episodes {rest}")
    option = "max_failures" if code == "E624" else "max_truncated"
    raise RunError(
        Finding(
            code=code,
            what=f"{call.node}: {len(places)} of {len(which)} episodes of iteration "
            f"{call.iteration} {what}",
            where=call.where,
            got="\n".join(shown),
            expected=f"at most the share {option}={most:g} of them",
        )
    )

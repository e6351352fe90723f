"""Episodes: a model and an environment answer each other, a bounded number of turns.

`observe` lets the environment answer, `act` lets the model go on, `ended` says what became of the
episodes; `episodes` puts them into a loop. All that the model was told is among its response's
tokens with a false `response_mask`. Contracts only: the bodies are in
`rlflow.ops.bodies.episodes`, and nothing here imports torch.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Literal

from rlflow.data import Chat
from rlflow.envs import Environment
from rlflow.graph.fields import Field, row, token
from rlflow.graph.model import Model
from rlflow.graph.op import Input, Op, register
from rlflow.graph.trace import (
    Handle,
    add_node,
    declared_names,
    declared_node,
    joined,
    report,
)
from rlflow.ops.episode_options import (
    bad_bounds,
    bad_limits,
    bad_shares,
    bad_turns,
    no_choice,
    no_environment,
)
from rlflow.ops.forwards import TOKENS
from rlflow.ops.loops import repeat
from rlflow.ops.models import MASK, rollout
from rlflow.rewards.bounds import PLAIN, Bounds

OnError = Literal["error", "end"]
Policy = Literal["keep", "drop_sample", "drop_group"]
OnFailure = Literal["error", "end", "drop_sample", "drop_group"]

LEFT_OUT: dict[str, Policy] = {"drop_sample": "drop_sample", "drop_group": "drop_group"}
MAX_FAILURES = 0.1
DRAWN = ("temperature", "top_p", "top_k", "ignore_eos")
STATE, FAILURE = "env_state", "failure"

SAMPLE = Input(name="sample", dtype="int64", levels=("row",))
RESPONSE = Input(name="response", dtype="text", levels=("row",))
DONE = Input(name="done", dtype="bool", levels=("row",))
CUT = Input(name="truncated", dtype="bool", levels=("row",))
TURNS = Input(name="turns", dtype="int64", levels=("row",))
EARNED = Input(name="reward", dtype="float32", levels=("row",))
SO_FAR = (
    DONE,
    CUT,
    TURNS,
    EARNED,
    Input(
        name=STATE,
        dtype="text",
        levels=("row",),
        hint="start = ops.observe(environment, samples)",
    ),
)
FAILED = Input(name=FAILURE, dtype="text", levels=("row",))

OBSERVE = register(
    Op(
        name="observe",
        body="rlflow.ops.bodies.observing:observe",
        inputs=(RESPONSE, SAMPLE),
        outputs=(
            row("observation", "text"),
            row("done", "bool"),
            row("finished", "bool"),
            row("reward"),
            row("turns", "int64"),
            row(STATE, "text"),
        ),
        per="row",
    )
)
ACT = register(
    Op(
        name="act",
        body="rlflow.ops.bodies.episodes:act",
        inputs=(
            *TOKENS,
            MASK,
            Input(name="rollout_log_probs", dtype="float32", levels=("token",)),
            Input(name="version", dtype="int64", levels=("token",)),
            RESPONSE,
            SAMPLE,
            DONE,
            CUT,
            Input(
                name="observation",
                dtype="text",
                levels=("row",),
                hint="told = ops.observe(environment, samples)",
            ),
        ),
        outputs=(
            token("response_tokens", "int64"),
            token("response_mask", "bool", mask=None),
            token("rollout_log_probs"),
            token("version", "int64"),
            row("response", "text"),
            row("done", "bool"),
            row("truncated", "bool"),
        ),
        per="row",
        use="rollout",
    )
)
ENDED = register(
    Op(
        name="ended",
        body="rlflow.ops.bodies.episodes:ended",
        inputs=(
            DONE,
            CUT,
            TURNS,
            EARNED,
            MASK,
            SAMPLE,
            RESPONSE,
            Input(name="prompt", dtype="text", levels=("row",), required=False),
        ),
        outputs=(row("truncated", "bool"),),
        per="batch",
        effect="effectful",
    )
)
GROUP = Input(name="group", dtype="int64", levels=("row",))


def observe(
    environment: Environment,
    *handles: Handle,
    on_error: OnError = "error",
    concurrency: int | None = None,
    timeout: float | None = None,
    retries: int = 0,
    backoff: float = 1.0,
    name: str | None = None,
) -> Handle:
    """Let an environment answer the last response of every episode that is not over.

    Upon the samples of a rollout it begins episodes, upon what `act` has made it goes on. Offers
    all fields of the episodes; it makes `observation` (text), `done`, `reward` (the sum so far,
    float32), `turns` (int64), `env_state` (JSON text), and `finished`: done, and neither cut
    off nor failed.

    Steps run at the same time, `concurrency` of them (16; in processes, one a core): an async
    step is awaited, a plain one runs in a thread, or with a `timeout` in a process that is killed
    after so many seconds. A step that fails is repeated up to `retries` times, after `backoff`
    seconds and then twice as long each time. What fails for good stops the run with the
    episode's number (E621); with `on_error="end"` it ends the episode, that step brings no
    reward, and `failure` has the cause.
    """
    bounds = Bounds(concurrency=concurrency, timeout=timeout, retries=retries, backoff=backoff)
    findings = no_environment(environment)
    findings += [*bad_bounds(bounds), *no_choice("on_error", on_error, OnError)]
    for finding in findings:
        report(finding)
    begun = any(offer.name == STATE for handle in handles for offer in handle.offers)
    ends = on_error == "end"
    read = environment.fields() if isinstance(environment, Environment) else ()
    first = tuple(Input(name=n, dtype="text", levels=("row",)) for n in read if n != "response")
    more = (*SO_FAR, *((FAILED,) if ends else ())) if begun else first
    made: tuple[Field, ...] = () if begun else (row("truncated", "bool"),)
    made += (row(FAILURE, "text"),) if ends else ()
    op = _op(OBSERVE, more, made)
    params: dict[str, Any] = {"environment": environment}
    params |= {"on_error": on_error} if ends else {}
    params |= {"bounds": bounds} if bounds != PLAIN else {}
    return joined(*handles, add_node(op, handles, params=params, name=name))


def act(
    model: Model,
    *handles: Handle,
    max_new_tokens: int,
    max_tokens: int,
    chat: bool | Chat = False,
    role: str = "user",
    name: str | None = None,
) -> Handle:
    """Let a model go on with every episode that is not over, after what it was told.

    The prompt of the turn is all there is so far: prompt, responses, and the observation, which
    joins the response's tokens with mask false, log-prob 0 and the version of the token before.
    With `chat` it is a message of `role` through the tokenizer's chat template. Tokens are
    drawn as those of the rollout were, with random numbers of this turn. An episode whose
    response has no room for another `max_new_tokens` within `max_tokens` or the model's context
    is over: `truncated`. Offers all fields of the episodes; `response` is the text of this turn.
    """
    for finding in bad_limits(max_new_tokens, max_tokens):
        report(finding)
    params: dict[str, Any] = {"max_new_tokens": max_new_tokens, "max_tokens": max_tokens}
    params |= _drawn(handles)
    params |= {"chat": chat, "role": role} if chat else {}
    return joined(*handles, add_node(ACT, handles, model=model, params=params, name=name))


def ended(
    *handles: Handle,
    truncated: Policy = "keep",
    failed: Policy = "keep",
    max_truncated: float | None = None,
    max_failures: float | None = None,
    name: str | None = None,
) -> Handle:
    """Say which episodes were cut off, count them, and leave some out.

    An episode is `truncated` where it is not done after its last turn, or had no more room.
    Those, or those that failed, are trained on as they are, or are not `valid`: with
    "drop_sample" they alone, with "drop_group" all episodes of their prompt. The run stops where
    more than the share `max_truncated` (any, unless given) or `max_failures` (0.1) of the
    episodes of an iteration are such, and says which.
    """
    drops = (truncated, failed)
    for option, value in (("truncated", truncated), ("failed", failed)):
        for finding in no_choice(option, value, Policy):
            report(finding)
    offered = {offer.name for handle in handles for offer in handle.offers}
    fails = FAILURE in offered
    for finding in bad_shares(max_truncated, max_failures, failed, fails=fails):
        report(finding)
    more = (*((FAILED,) if fails else ()), *((GROUP,) if "drop_group" in drops else ()))
    made = (row("valid", "bool"),) if {*drops} != {"keep"} else ()
    params: dict[str, Any] = {"truncated": truncated, "failed": failed}
    params |= {"max_truncated": 1.0 if max_truncated is None else max_truncated}
    params |= {"max_failures": MAX_FAILURES if max_failures is None else max_failures}
    op = _op(ENDED, more, made)
    return joined(*handles, add_node(op, handles, params=params, name=name))


def episodes(
    model: Model,
    environment: Environment,
    *prompts: Handle,
    n: int = 1,
    max_turns: int,
    max_new_tokens: int,
    max_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    chat: bool | Chat = False,
    expected: float | None = None,
    on_error: OnFailure = "error",
    truncated: Policy = "keep",
    max_truncated: float | None = None,
    max_failures: float | None = None,
    concurrency: int | None = None,
    timeout: float | None = None,
    retries: int = 0,
    backoff: float = 1.0,
    name: str | None = None,
) -> Handle:
    """`n` episodes of every prompt: the model responds, the environment answers, in turns.

    At most `max_turns` responses of at most `max_new_tokens` tokens each; all that was said
    after the prompt has at most `max_tokens`. Declares a `rollout`, and a loop of `act` and
    `observe` until all episodes are over, and `ended`; the options are theirs. `on_error` is
    "error", or what becomes of an episode whose environment failed: "end", "drop_sample",
    "drop_group". `expected` is how many turns an iteration takes on average until all of its
    episodes are over, for the estimates of a plan. Offers the fields of the samples, `reward`
    (the sum of all steps), `turns`, `truncated`, and `valid` where episodes are left out.
    """
    for finding in [*no_choice("on_error", on_error, OnFailure), *bad_turns(max_turns, expected)]:
        report(finding)
    own = name or _free("episodes")
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    limits: dict[str, Any] = {"concurrency": concurrency, "timeout": timeout, "retries": retries}
    limits |= {"backoff": backoff, "on_error": "error" if on_error == "error" else "end"}
    samples = rollout(model, *prompts, n=n, max_new_tokens=max_new_tokens, chat=chat, **sampling)
    start = observe(environment, samples, name=f"{own}.observe", **limits)
    turns: dict[str, Any] = {"max_new_tokens": max_new_tokens, "max_tokens": max_tokens}
    turns |= {"chat": chat, "role": getattr(environment, "role", "user")}

    def turn(state: Handle) -> Handle:
        said = act(model, state, name=f"{own}.act", **turns)
        return observe(environment, said, name=f"{own}.observe.next", **limits)

    if max_turns > 1:
        most, loop = max_turns - 1, f"{own}.turns"
        trips = None if expected is None else min(max(expected - 1, 1.0), float(most))
        start = repeat(turn, start, until="done", at_most=most, expected=trips, name=loop)
    return ended(
        start,
        truncated=truncated,
        failed=LEFT_OUT.get(on_error, "keep"),
        max_truncated=max_truncated,
        max_failures=max_failures,
        name=own,
    )


def _op(op: Op, read: tuple[Input, ...], made: tuple[Field, ...]) -> Op:
    """An op that reads and makes more."""
    return replace(op, inputs=(*op.inputs, *read), outputs=(*op.outputs, *made))


def _drawn(handles: tuple[Handle, ...]) -> dict[str, Any]:
    """How the tokens so far were drawn; a temperature of 1 where nobody says."""
    found: dict[str, Any] = {"temperature": 1.0}
    for handle in handles:
        for offer in handle.offers if isinstance(handle, Handle) else ():
            if offer.name == "response_tokens":
                known = declared_node(offer.source).params
                found |= {key: value for key, value in known if key in DRAWN}
    return found


def _free(wanted: str) -> str:
    """A name that no node has, nor the nodes of other episodes."""
    taken = {name.partition(".")[0] for name in declared_names()}
    names = (wanted if number == 1 else f"{wanted}_{number}" for number in itertools.count(1))
    return next(name for name in names if name not in taken)

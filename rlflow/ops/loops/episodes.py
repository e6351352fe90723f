"""Episodes: a model and an environment answer each other, a bounded number of turns.

`observe` lets the environment answer, `act` lets the model go on, `ended` says what became of the
episodes; `episodes` puts them into a loop. All that the model was told is among its response's
tokens with a false `response_mask`. Contracts only: the bodies are in
`rlflow.ops.bodies.loops.episodes`, and nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from rlflow.data import Chat
from rlflow.envs import Environment
from rlflow.graph.fields import Field, row, token
from rlflow.graph.model import Model
from rlflow.graph.op import Input, Op, register
from rlflow.graph.roles import SamplingOptions
from rlflow.graph.trace import (
    Handle,
    add_node,
    declared_node,
    free_name,
    merged_handles,
    report_finding,
)
from rlflow.ops.forwards import TOKENS
from rlflow.ops.loops.episode_options import (
    bad_bounds,
    bad_limits,
    bad_shares,
    bad_turns,
    no_choice,
    no_environment,
)
from rlflow.ops.loops.loops import repeat
from rlflow.ops.models import MASK, rollout
from rlflow.ops.rows.pictures import no_pictures
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
        body="rlflow.ops.bodies.loops.observing:observe",
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
        body="rlflow.ops.bodies.loops.episodes:act",
        roles=(SamplingOptions,),
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
        body="rlflow.ops.bodies.loops.episodes:ended",
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

    On the samples of a rollout it begins episodes; on what `act` made it continues them. Makes
    `observation` (text), `done`, `reward` (the sum so far, float32), `turns` (int64), `env_state`
    (JSON text), and `finished`: done, and neither truncated nor failed. Offers all fields of the
    episodes.

    Steps run concurrently, `concurrency` of them (16; in processes, one a core). An async step is
    awaited. A plain one runs in a thread, or with a `timeout` in a process that is killed after so
    many seconds. A step that fails is repeated up to `retries` times, after `backoff` seconds and
    then twice as long each time. A step that fails for good stops the run with the episode's
    number (E621). With `on_error="end"` it ends the episode instead: that step brings no reward,
    and `failure` holds the cause.
    """
    bounds = Bounds(concurrency=concurrency, timeout=timeout, retries=retries, backoff=backoff)
    findings = no_environment(environment)
    findings += [*bad_bounds(bounds), *no_choice("on_error", on_error, OnError)]
    for finding in findings:
        report_finding(finding)
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
    return merged_handles(*handles, add_node(op, handles, params=params, name=name))


def act(
    model: Model,
    *handles: Handle,
    max_new_tokens: int,
    max_tokens: int,
    chat: bool | Chat = False,
    role: str = "user",
    name: str | None = None,
) -> Handle:
    """Let a model continue every episode that is not over, after the environment's observation.

    The prompt of the turn is the whole episode so far: prompt, responses and observations. The
    observation joins the response's tokens with a false mask, log-prob 0 and the version of the
    token before it. With `chat` it is a message of `role` through the tokenizer's chat template.
    Tokens are sampled as the rollout's were, with random numbers of this turn.

    An episode ends as `truncated` where `max_tokens` or the model's context leave no room for
    another `max_new_tokens`. Offers all fields of the episodes; `response` is the text of this
    turn.
    """
    for finding in bad_limits(max_new_tokens, max_tokens):
        report_finding(finding)
    params: dict[str, Any] = {"max_new_tokens": max_new_tokens, "max_tokens": max_tokens}
    params |= _drawn(handles)
    params |= {"chat": chat, "role": role} if chat else {}
    no_pictures("a turn of an episode", handles)
    return merged_handles(*handles, add_node(ACT, handles, model=model, params=params, name=name))


def ended(
    *handles: Handle,
    truncated: Policy = "keep",
    failed: Policy = "keep",
    max_truncated: float | None = None,
    max_failures: float | None = None,
    name: str | None = None,
) -> Handle:
    """Mark the episodes that were cut off, count them, and leave some out of training.

    An episode is `truncated` where it is not done after its last turn, or where its tokens ran
    out. Truncated episodes, and failed ones, are kept, or are not `valid`: with "drop_sample" they
    alone, with "drop_group" all episodes of their prompt. The run stops where more than the share
    `max_truncated` (any, unless given) or `max_failures` (0.1) of an iteration's episodes are
    truncated or failed.
    """
    drops = (truncated, failed)
    for option, value in (("truncated", truncated), ("failed", failed)):
        for finding in no_choice(option, value, Policy):
            report_finding(finding)
    offered = {offer.name for handle in handles for offer in handle.offers}
    fails = FAILURE in offered
    for finding in bad_shares(max_truncated, max_failures, failed, fails=fails):
        report_finding(finding)
    more = (*((FAILED,) if fails else ()), *((GROUP,) if "drop_group" in drops else ()))
    made = (row("valid", "bool"),) if {*drops} != {"keep"} else ()
    params: dict[str, Any] = {"truncated": truncated, "failed": failed}
    params |= {"max_truncated": 1.0 if max_truncated is None else max_truncated}
    params |= {"max_failures": MAX_FAILURES if max_failures is None else max_failures}
    op = _op(ENDED, more, made)
    return merged_handles(*handles, add_node(op, handles, params=params, name=name))


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
    """`n` episodes of every prompt: the model responds and the environment answers, in turns.

    An episode has at most `max_turns` responses of at most `max_new_tokens` tokens; responses and
    observations together have at most `max_tokens`. Declares a `rollout`, a loop of `act` and
    `observe` until all episodes are over, and `ended`; the options are theirs. `on_error` is
    "error", or what becomes of an episode whose environment failed: "end", "drop_sample" or
    "drop_group". `expected` is the mean number of turns until all episodes of an iteration are
    over, for the estimates of a plan. Offers the fields of the samples, `reward` (the sum of all
    steps), `turns`, `truncated`, and `valid` where episodes are left out.
    """
    for finding in [*no_choice("on_error", on_error, OnFailure), *bad_turns(max_turns, expected)]:
        report_finding(finding)
    own = name or free_name("episodes")
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

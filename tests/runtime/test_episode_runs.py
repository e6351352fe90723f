"""Whole runs of episodes: the same bits in every placement, what is told carries no gradient."""

from __future__ import annotations

import pytest

from tests.conftest import TINY
from tests.runtime.test_stale_runs import numbers, state

pytestmark = pytest.mark.torch

DECLARED = f"""
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    ends: str = "right"
    turns: int = 3
    on_error: str = "error"
    max_truncated: float = 1.0
    max_failures: float = 1.0
    max_tokens: int = 24
    told: float = 0.0
    everything: bool = False
    compared: bool = False
    lr: float = 1e-3


class Again(rf.Environment):
    def __init__(self, ends):
        self.ends = ends

    def begin(self, prompt):
        return {{"prompt": prompt, "turn": 0}}

    def step(self, state, response):
        state["turn"] += 1
        letters = sum(map(ord, response))
        if self.ends == "raises" and letters % 5 == 0:
            raise LookupError("no such sum")
        right = letters % 3 == 0 and self.ends != "never"
        return rf.Step(state["prompt"], right, letters % 7 / state["turn"], state)


@rf.op(per="row")
def ref_log_probs(
    rollout_log_probs: rf.Token[float], response_mask: rf.Token[bool], *, told: float = 0.0
) -> rf.Token[float]:
    import torch
    from rlflow.batch import flat, ragged_like

    values = flat(rollout_log_probs) - 0.1
    changed = torch.where(flat(response_mask), values, torch.tensor(told))
    return ragged_like(changed, rollout_log_probs)


@rf.op(per="row")
def response_mask(response_tokens: rf.Token[int]) -> rf.Token[bool]:
    import torch
    from rlflow.batch import flat, ragged_like

    return ragged_like(torch.ones(len(flat(response_tokens))).bool(), response_tokens)


def seen(
    version: list[list[int]], response_mask: list[list[bool]], rollout_log_probs: list[list[float]]
) -> dict[str, float]:
    tokens = [number for row in version for number in row]
    lengths = {{len(a) - len(b) for a, b in zip(version, response_mask)}}
    quiet = [
        number
        for row, mask in zip(rollout_log_probs, response_mask)
        for number, own in zip(row, mask)
        if not own
    ]
    told = [sum(a and not b for a, b in zip(mask, mask[1:])) for mask in response_mask]
    return {{
        "least_told": min(told),
        "most_told": max(told),
        "oldest": min(tokens),
        "newest": max(tokens),
        "first": max(row[0] for row in version),
        "last": max((row[-1] for row in version if len(row) > 6), default=0),
        "uneven": max(map(abs, lengths)),
        "ordered": all(sorted(row) == row for row in version),
        "loud": max(map(abs, quiet), default=0.0),
    }}


def apart_by(
    response_mask: list[list[bool]],
    rollout_log_probs: list[list[float]],
    old_log_probs: list[list[float]],
) -> dict[str, float]:
    return {{
        "most": max(
            abs(a - b)
            for mask, one, other in zip(response_mask, rollout_log_probs, old_log_probs)
            for own, a, b in zip(mask, one, other)
            if own
        )
    }}


def together(**options):
    return rf.Placement(pools={{"all": 1}}, assign={{"*": rf.on("all")}}, **options)


def apart(**options):
    assign = {{"*": rf.on("train"), "actor.rollout": rf.on("gen")}}
    return rf.Placement(pools={{"train": 1, "gen": 1}}, assign=assign, **options)


PLACEMENTS = {{"together": together(), "apart": apart()}}
PLACEMENTS |= {{f"{{name}}_stale": made(staleness=1) for name, made in
               (("together", together), ("apart", apart))}}
PLACEMENTS |= {{f"{{name}}_paused": made(staleness=1, pause_at=2) for name, made in
               (("together", together), ("apart", apart))}}
PLACEMENTS |= {{"streamed": apart(stream=2), "streamed_paused": apart(
    stream=2, staleness=1, pause_at=2)}}


@rf.pipeline(placements=PLACEMENTS)
def again(cfg: Config) -> None:
    actor = rf.Model("actor", {str(TINY)!r}, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=1, test_size=20), batch=4)
    limits = {{"max_failures": cfg.max_failures}} if cfg.on_error != "error" else {{}}
    rows = ops.episodes(
        actor, Again(cfg.ends), prompts, n=4, max_turns=cfg.turns, max_new_tokens=4,
        max_tokens=cfg.max_tokens, on_error=cfg.on_error, max_truncated=cfg.max_truncated, **limits
    )
    ops.metrics(rows, function=seen, name="seen")
    if cfg.compared:
        own = ops.log_probs(actor, rows)
        ops.metrics(rows.only("response_mask", "rollout_log_probs"), own, function=apart_by)
    adv = ops.advantage("grpo", rows)
    if cfg.everything:
        names = [o.name for o in rows.offers if o.name != "response_mask"]
        rows = rows.only(*names), response_mask(rows)
        ops.update(actor, *rows, adv, loss=rf.PolicyLoss())
        return
    ref = ref_log_probs(rows, told=cfg.told)
    ops.update(actor, rows, adv, ref, loss=rf.PolicyLoss(kl_coef=0.1))
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The words of a run in a directory."""
    monkeypatch.chdir(tmp_path)

    def words(run, placement, *settings):
        file = tmp_path / "again.py"
        file.write_text(DECLARED)
        options = ("--placement", placement, "--devices", "cpu:2", "--threads", "1")
        given = [word for setting in settings for word in ("--set", setting)]
        kept = ("--run-dir", run, "--iterations", 4, "--save-every", 2, "-q")
        return ("run", file, *options, *kept, *given)

    return words


@pytest.fixture(scope="module")
def finished():
    """The directories of runs that are done, by what was run; tests only read them."""
    return {}


@pytest.fixture
def train(rlflow, command, finished, tmp_path_factory):
    """The run directory of a run, made once."""

    def call(*words):
        if words not in finished:
            run = tmp_path_factory.mktemp("episodes") / "run"
            result = rlflow(*command(run, *words))
            assert 0 == result.code, result.err
            finished[words] = run
        return finished[words]

    return call


@pytest.mark.parametrize("how", ["", "_stale", "_paused"])
def test_colocated_and_split_runs_have_the_same_bits(train, how):
    assert state(train(f"together{how}")) == state(train(f"apart{how}"))


@pytest.mark.parametrize(
    ("cut", "whole"), [("streamed", "apart"), ("streamed_paused", "apart_paused")]
)
def test_episodes_do_not_depend_on_how_their_first_turns_are_cut(train, cut, whole):
    mine, theirs = numbers(train(cut)), numbers(train(whole))
    for one, other in zip(mine, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_several_turns_are_taken_and_counted(train):
    for line in numbers(train("together")):
        assert 1 < line["episodes/turns"] < 3 == line["episodes/turns_max"]
        assert line["episodes.turns/done"] == 1 - line["episodes/truncated"]
        assert 0 == line["seen/uneven"] == line["seen/loud"]
        assert 1 == line["seen/ordered"]
        assert 0 < line["episodes/told"] < 1


def test_versions_are_those_of_the_weights_that_said_it(train):
    """A checkpoint after every 2 iterations, so those are v0 v1 | v2 v3, and i - 1 when stale."""
    for i, line in enumerate(numbers(train("together"))):
        assert (i, i) == (line["seen/oldest"], line["seen/newest"])
    for i, line in enumerate(numbers(train("apart_stale"))):
        older = i - i % 2
        assert (older, older) == (line["seen/oldest"], line["seen/newest"])
    for i, line in enumerate(numbers(train("apart_paused"))):
        assert (i - i % 2, i) == (line["seen/first"], line["seen/last"])


@pytest.mark.parametrize("placement", ["together", "apart_paused", "streamed"])
def test_each_turn_goes_on_from_the_one_before(train, placement):
    for line in numbers(train(placement, "ends=never")):
        assert 2 == line["seen/least_told"] == line["seen/most_told"]


def test_log_probs_are_those_of_the_tokens_that_were_said(train):
    lines = numbers(train("together", "compared=true"))
    assert 4 == len(lines)
    for line in lines:
        assert line["metrics/most"] < 1e-4


def test_what_is_told_carries_no_gradient(train):
    _, weights = state(train("together"))
    metrics, spoiled = state(train("together", "told=nan"))
    assert weights == spoiled
    assert b"nan" not in metrics.lower()


def test_without_the_mask_it_would(train):
    _, weights = state(train("together", "everything=true"))
    assert weights != state(train("together"))[1]


def test_an_environment_that_never_ends_is_bounded_and_counted(train, rlflow, command, tmp_path):
    for line in numbers(train("together", "ends=never")):
        assert (1, 3, 0) == tuple(
            line[f"episodes{key}"] for key in ("/truncated", "/turns", ".turns/done")
        )
    result = rlflow(*command(tmp_path / "run", "together", "ends=never", "max_truncated=0.5"))
    assert 0 != result.code
    assert "E625" in result.err
    assert "16 of 16 episodes of iteration 0 did not end" in result.err


def test_an_episode_has_no_more_tokens_than_said(train):
    for line in numbers(train("together", "ends=never", "max_tokens=11", "turns=6")):
        assert 1 == line["episodes/truncated"]
        assert line["episodes/length"] <= 11
        assert line["episodes/turns"] < 3


def test_an_environment_that_fails_stops_the_run(rlflow, command, tmp_path):
    result = rlflow(*command(tmp_path / "run", "together", "ends=raises"))
    assert 0 != result.code
    assert "E621" in result.err
    assert "LookupError: no such sum" in result.err


def test_or_its_episodes_are_left_out(train, rlflow, command, tmp_path):
    kept = numbers(train("together", "ends=raises", "on_error=end"))
    left = numbers(train("together", "ends=raises", "on_error=drop_sample"))
    group = numbers(train("together", "ends=raises", "on_error=drop_group"))
    assert kept[0]["episodes/failed"] == left[0]["episodes/failed"] == left[0]["episodes/dropped"]
    assert 0 < left[0]["episodes/dropped"] <= group[0]["episodes/dropped"]
    assert "episodes/dropped" not in kept[0]
    words = ("ends=raises", "on_error=drop_sample", "max_failures=0.01")
    result = rlflow(*command(tmp_path / "run", "together", *words))
    assert 0 != result.code
    assert "E624" in result.err


def test_one_turn_is_a_rollout(train):
    for line in numbers(train("together", "turns=1")):
        assert (1, 0) == (line["episodes/turns"], line["episodes/told"])

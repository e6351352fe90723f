"""Every feature in whole runs: no bit depends on the placement, on a break, or on Ray.

A row is a feature; its columns are the placements whose bits are the same, the runs that go on
from a checkpoint to the bits of the uninterrupted one, and those that Ray runs to the same bits.
What only one feature promises is in a suite of its own, which reads the same runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.runtime.whole_runs import (
    ADAPTED,
    ADAPTIVE,
    AGAIN,
    AVERAGED,
    BEHIND,
    BY_ROW,
    COUNTING,
    DRAFTED,
    DRAWN,
    FROZEN,
    GRPO,
    HELPED,
    INSIDE,
    KEPT,
    LASTING,
    LEVELS,
    MIXED,
    OVERSAMPLED,
    PAUSED,
    PPO,
    REPLAYED,
    REPLICAS,
    SEQUENTIAL,
    STALE,
    TURNS,
    TWICE,
    WEIGHTS,
    Declared,
    kinds,
    last_checkpoint,
    plan_of,
    shipped,
    state,
)

pytestmark = pytest.mark.torch


class At(NamedTuple):
    """A cell: a placement, what is said beside it, and how a run of it is cut short.

    It breaks at the failpoint `fault`, else it ends after `first` iterations; `saved` is the
    newest checkpoint that it then has.
    """

    placement: str
    words: tuple[Any, ...] = ()
    fault: str = ""
    first: int = 0
    saved: int = 0
    marks: tuple[pytest.MarkDecorator, ...] = ()


class Feature(NamedTuple):
    """A row; the first of the placements is the one that the others are compared with."""

    what: Declared
    same: tuple[At, ...] = ()
    resumed: tuple[At, ...] = ()
    ray: tuple[At, ...] = ()


SLOW, RAY, EXTRA = (pytest.mark.slow,), (pytest.mark.ray,), (pytest.mark.extra,)


def placed(*names: str, marks: tuple[pytest.MarkDecorator, ...] = ()) -> tuple[At, ...]:
    """Cells of placements without a word."""
    return tuple(At(name, marks=marks) for name in names)


def broken(placement: str, iteration: int, saved: int, **more: Any) -> At:
    """A run that breaks when it has done so many iterations."""
    return At(placement, fault=f"run:iteration=raise@{iteration}", saved=saved, **more)


BOTH, TWO = placed("colocate", "split"), placed("together", "apart")
BOTH_SLOW, TWO_SLOW = (
    placed("colocate", "split", marks=SLOW),
    placed("together", "apart", marks=SLOW),
)

TABLE = {
    "grpo": Feature(GRPO, same=BOTH),
    "kl": Feature(
        GRPO.said("--set", "kl_coef=0.05"),
        same=BOTH_SLOW,
        ray=(*placed("colocate", marks=SLOW + EXTRA), At("split", marks=SLOW)),
    ),
    "ppo": Feature(PPO, same=BOTH),
    "adapters": Feature(
        ADAPTED, same=placed("together", "split"), resumed=(At("together", first=1, saved=1),)
    ),
    "frozen": Feature(
        FROZEN,
        same=placed("together", "split", marks=SLOW),
        resumed=(At("split", first=1, saved=1),),
    ),
    "average": Feature(
        AVERAGED,
        same=placed("together", "split", marks=SLOW),
        resumed=(At("split", first=1, saved=1, marks=SLOW),),
    ),
    "drafter": Feature(DRAFTED, same=BOTH_SLOW),
    "stale 0": Feature(STALE, same=(*placed("together0", "apart0"), *TWO_SLOW)),
    "stale 1": Feature(
        STALE,
        same=placed("together1", "apart1"),
        resumed=(broken("apart1", 6, 4), broken("apart1", 3, 0, marks=SLOW)),
        ray=placed("apart1", marks=SLOW),
    ),
    "stale 2": Feature(
        STALE,
        same=placed("together2", "apart2", marks=SLOW),
        resumed=(
            At("apart2", first=4, saved=4, marks=SLOW),
            At("apart2", fault="run:saved=raise@1", saved=4, marks=SLOW),
        ),
        ray=placed("apart2", marks=SLOW + EXTRA),
    ),
    "stale 3": Feature(
        STALE,
        same=placed("together3", "apart3", marks=SLOW),
        resumed=(broken("apart3", 6, 4, marks=SLOW),),
    ),
    "stale and weighed": Feature(WEIGHTS, same=placed("together2", "apart2", marks=SLOW)),
    "helped": Feature(HELPED, same=(*placed("together"), At("helped0"))),
    "helped 1": Feature(
        HELPED,
        same=placed("helped1"),
        resumed=(broken("helped1", 6, 4, marks=SLOW),),
        ray=placed("helped1", marks=SLOW),
    ),
    "paused 1": Feature(
        PAUSED, same=placed("together1", "apart1"), resumed=(broken("apart1", 6, 4, marks=SLOW),)
    ),
    "paused 2": Feature(
        PAUSED,
        same=placed("together2", "apart2", marks=SLOW),
        resumed=(broken("apart2", 3, 0, marks=SLOW),),
        ray=(
            At("apart2", marks=SLOW + EXTRA),
            At("apart2", ("--stream", "2"), marks=SLOW),
        ),
    ),
    "paused and weighed": Feature(
        PAUSED.said("--set", "epochs=2"),
        same=(At("together2", marks=SLOW), At("apart2", marks=SLOW)),
    ),
    "continuous": Feature(
        LASTING,
        resumed=(
            broken("apart2", 5, 3),
            broken("together3", 4, 3, marks=SLOW),
            broken("apart4", 2, 0, marks=SLOW),
            At("apart4", fault="run:saved=raise@2", saved=6, marks=SLOW),
            At("together1", first=3, saved=3, marks=SLOW),
        ),
        ray=(*placed("apart2", marks=SLOW), *placed("apart4", marks=SLOW + EXTRA)),
    ),
    "continuous replicas": Feature(
        REPLICAS,
        same=(At("apart4"), At("replicas4", marks=SLOW + RAY)),
        resumed=(broken("replicas4", 5, 3, marks=SLOW + RAY + EXTRA),),
    ),
    "oversampled": Feature(
        OVERSAMPLED.said("--devices", "cpu:3"),
        same=(At("together"), At("apart", marks=SLOW), At("replicas", marks=SLOW + RAY)),
        resumed=(broken("ahead", 3, 2),),
        ray=placed("apart", marks=SLOW + EXTRA),
    ),
    "loop": Feature(
        MIXED,
        same=TWO,
        resumed=(broken("stale", 6, 4, marks=SLOW),),
        ray=(*placed("stale", marks=SLOW + EXTRA), *placed("stream", marks=SLOW + EXTRA)),
    ),
    "loop with rows left over": Feature(
        KEPT,
        same=TWO_SLOW,
        resumed=(broken("together", 6, 3),),
        ray=placed("apart", marks=SLOW + EXTRA),
    ),
    "loop with a state": Feature(COUNTING, same=TWO_SLOW, ray=placed("apart", marks=SLOW + EXTRA)),
    "loop after a loop": Feature(SEQUENTIAL, resumed=(At("one", first=2, saved=2, marks=SLOW),)),
    "turns of tries": Feature(
        TURNS,
        same=TWO_SLOW,
        resumed=(At("apart", first=2, saved=2, marks=SLOW),),
        ray=placed("apart", marks=SLOW + EXTRA),
    ),
    "drawn episodes": Feature(
        DRAWN,
        same=TWO_SLOW,
        resumed=(At("stale", first=2, saved=2, marks=SLOW),),
        ray=placed("apart", marks=SLOW + EXTRA),
    ),
    "drawn and chosen": Feature(TWICE, same=TWO_SLOW, ray=placed("apart", marks=SLOW + EXTRA)),
    "episodes": Feature(AGAIN, same=TWO),
    "stale episodes": Feature(AGAIN, same=placed("together_stale", "apart_stale", marks=SLOW)),
    "paused episodes": Feature(AGAIN, same=placed("together_paused", "apart_paused", marks=SLOW)),
    "pass rates": Feature(LEVELS, same=(*TWO_SLOW, *placed("pooled", "streamed", marks=SLOW))),
    "pass rates in a loop": Feature(INSIDE, same=TWO_SLOW),
    "pass rates behind a loop": Feature(BEHIND, same=placed("together", "apart", marks=SLOW)),
    "pass rates of rows": Feature(BY_ROW, same=placed("together", "pooled", marks=SLOW)),
    "stale pass rates": Feature(
        LEVELS,
        same=placed("late", "late_apart", marks=SLOW),
        resumed=(broken("late_apart", 4, 2, marks=SLOW),),
    ),
    "stale pass rates in a loop": Feature(
        INSIDE,
        same=placed("late", "late_apart", marks=SLOW),
        resumed=(broken("late_apart", 4, 2, marks=SLOW),),
    ),
    "adaptive": Feature(
        ADAPTIVE,
        resumed=(
            broken("one", 4, 2),
            broken("old", 4, 2, marks=SLOW),
            At("two", first=3, saved=3, marks=SLOW + RAY),
        ),
        ray=(At("one", ("--iterations", 3), marks=SLOW),),
    ),
    "replayed": Feature(
        REPLAYED, same=BOTH_SLOW, resumed=(At("split", first=2, saved=2, marks=SLOW),)
    ),
    **{
        name: Feature(shipped(name, "--set", "eval_every=9", iterations=2), same=BOTH_SLOW)
        for name in ("mixed_demonstrations", "pods", "reference_baseline")
    },
    **{
        name: Feature(
            shipped(name, "--staleness", 0),
            same=BOTH_SLOW,
            resumed=(broken("split", 3, 2, marks=SLOW),),
        )
        for name in ("beat_reference", "delayed_ppo", "kept_samples", "topr")
    },
}


def column(name: str) -> Iterator[Any]:
    """The rows and cells of a column; of placements those that are compared with the first."""
    for row, feature in TABLE.items():
        for cell in getattr(feature, name)[name == "same" :]:
            told = " ".join((row, cell.placement, cell.fault, *map(str, cell.words))).rstrip()
            yield pytest.param(feature, cell, id=told, marks=cell.marks)


@pytest.mark.rows(4)
@pytest.mark.parametrize(("feature", "cell"), column("same"))
def test_a_placement_changes_no_bit(train, feature, cell):
    first = feature.same[0].placement
    assert state(train(feature.what, first)) == state(train(feature.what, cell.placement))


@pytest.mark.rows(2)
@pytest.mark.parametrize(("feature", "cell"), column("resumed"))
def test_a_resumed_run_has_the_bits_of_one_that_was_not(train, tmp_path, feature, cell):
    whole, run = train(feature.what, cell.placement), tmp_path / "run"
    if cell.fault:
        train.broken(run, cell.fault, feature.what, cell.placement)
    else:
        begun = train.begun(run, feature.what, cell.placement, "--iterations", cell.first)
        assert 0 == begun.code, begun.err
    latest = run / "checkpoints" / "LATEST"
    assert cell.saved == (int(last_checkpoint(run).name[-6:]) if latest.exists() else 0)
    assert state(whole) == state(train.resumed(run, feature.what, cell.placement))


@pytest.mark.ray
@pytest.mark.parametrize(("feature", "cell"), column("ray"))
def test_one_process_a_device_has_the_bits_of_one_process(train, one_node, feature, cell):
    here = train(feature.what, cell.placement, *cell.words)
    there = train(feature.what, cell.placement, *cell.words, "--address", one_node)
    assert "transfer" not in kinds(here)
    assert "ray" == plan_of(there)["backend"]
    assert state(here) == state(there)

"""`make kills N=200`: kills of chance, in runs in this process, on Ray and with an engine.

RLFLOW_KILLS is how many in all, RLFLOW_KILLS_SEED draws them, RLFLOW_KILLS_REPORT is the page, to
which those of one session after the other are added; RLFLOW_KILLS_SETUPS names some setups.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.kills import Campaign, Kill, victims
from tests.chaos.report import alone, by_line, now
from tests.chaos.scene import SLOWER, Scene

COUNT = int(os.environ.get("RLFLOW_KILLS") or 0)
SEED = int(os.environ.get("RLFLOW_KILLS_SEED") or 0)
PAGE = os.environ.get("RLFLOW_KILLS_REPORT")
ENGINE = bool(os.environ.get("RLFLOW_SGLANG_PYTHON"))
NAMED = (os.environ.get("RLFLOW_KILLS_SETUPS") or "local,ray,engine").split(",")
VICTIMS = tuple(each for each in os.environ.get("RLFLOW_KILLS_VICTIMS", "").split(",") if each)
# Kills of a campaign; an engine takes longest to start.
EACH = {"local": 10, "ray": 10, "engine": 5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A campaign: its kills all as they have to be, or what was not."""

    setup: str
    seed: int
    kills: int
    failed: str
    when: str
    slower: float


def campaigns() -> list[tuple[str, int, int]]:
    """The setup, seed and kills of each campaign, setups in turn, until there are enough."""
    names = [name for name in NAMED if victims(name, VICTIMS) and (name != "engine" or ENGINE)]
    found: list[tuple[str, int, int]] = []
    left = COUNT
    while left > 0:
        name = names[len(found) % len(names)]
        found.append((name, SEED * 1000 + len(found), min(left, EACH[name])))
        left -= EACH[name]
    return found


pytestmark = [pytest.mark.torch, pytest.mark.kills, pytest.mark.timeout(3600 * SLOWER)]


def put_down(kills: list[Kill], ended: Ended) -> None:
    """Add a campaign to the page."""
    if not PAGE:
        return
    page = Path(PAGE)
    with alone(page.parent):
        file = page.with_suffix(".json")
        known = json.loads(file.read_text()) if file.exists() else {"kills": [], "campaigns": []}
        all_kills = [*(Kill(**each) for each in known["kills"]), *kills]
        all_ended = [*(Ended(**each) for each in known["campaigns"]), ended]
        file.write_text(by_line(kills=all_kills, campaigns=all_ended))
        page.write_text(written(all_kills, all_ended))


def written(kills: list[Kill], ended: list[Ended]) -> str:
    """The page in Markdown."""
    failed = [each for each in ended if each.failed]
    lines = [
        "# Kills of chance",
        "",
        f"{len(kills)} kills in {len(ended)} campaigns, {len(failed)} of which failed. "
        "`make kills N=200 SEED=1` adds more. A process of a run is killed at a moment that chance "
        "says; the driver dies, or one typed error is told, or the run goes on; no process, shared "
        "memory, socket or temporary file is left; and the run goes on until it has come to its "
        "end with the bits of one that nobody disturbed.",
        "",
        "| setup | killed | times | errors told | longest seconds to the end |",
        "| --- | --- | --- | --- | --- |",
    ]
    for setup, victim in sorted({(kill.setup, kill.victim) for kill in kills}):
        mine = [kill for kill in kills if (kill.setup, kill.victim) == (setup, victim)]
        codes = ", ".join(sorted({kill.said or "none" for kill in mine}))
        longest = max(kill.seconds for kill in mine)
        lines.append(f"| {setup} | {victim} | {len(mine)} | {codes} | {longest:.1f} |")
    lines += ["", "| campaign | seed | kills | deadlines times | what failed |"]
    lines.append("| --- | --- | --- | --- | --- |")
    lines += [
        f"| {each.when} {each.setup} | {each.seed} | {each.kills} | {each.slower:g} | "
        + (each.failed or "nothing").replace("|", "\\|").replace("\n", " ")
        + " |"
        for each in ended
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("name", "seed", "count"), campaigns())
def test_whatever_is_killed_nothing_is_lost_and_nothing_is_left(name: str, seed: int, count: int):
    folder = Path(tempfile.mkdtemp(prefix="kills-", dir="/tmp"))
    scene = Scene(folder, zlib.crc32(f"{name} {seed}".encode()), folder)
    kills: list[Kill] = []
    failed = "was ended"
    try:
        for kill in Campaign(scene, name, VICTIMS).kills(count):
            kills.append(kill)
        failed = ""
    except AssertionError as error:
        failed = " ".join(str(error).split())[:200]
        raise
    finally:
        scene.close()
        made = Ended(
            setup=" ".join(dict.fromkeys((name, *(victims(name, VICTIMS) if VICTIMS else ())))),
            seed=seed,
            kills=len(kills),
            failed=failed,
            when=now(),
            slower=SLOWER,
        )
        put_down(kills, made)
        if not failed:
            shutil.rmtree(folder, ignore_errors=True)

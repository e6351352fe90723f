"""The page in headless Chromium: no errors, no request, accessible, usable by keyboard, in time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlflow.batch import ragged, text
from rlflow.report.interactive.serve import WatchedRun, serving_page
from rlflow.report.report import write_report
from rlflow.report.runfiles import read_run_files
from rlflow.report.waiting.idle import idle_iteration
from rlflow.runtime.record.edges.names import About
from rlflow.runtime.record.edges.writing import edge_table, write_edge
from rlflow.scheduler.plan.plan import Plan
from tests.viz.browser import Tab, browsing, chromium
from tests.viz.examples import write_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no chromium here (RLFLOW_CHROMIUM names one)"),
]
pytest.importorskip("websocket", reason="websocket-client is not installed")

LOOKS = {"light": {}, "dark": {"dark": True}, "narrow": {"width": 380}, "print": {"media": "print"}}
LONGEST_MS, LARGEST = 2_000, 15e6


@pytest.fixture(scope="module")
def runs(split: Plan, squeezed: Plan, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run with figures of devices, and a longer one of another plan."""
    home = tmp_path_factory.mktemp("runs")
    paths = [home / "first", home / "second"]
    for path, plan, count in zip(paths, (split, squeezed), (6, 12), strict=True):
        write_run(path, plan, count)
        lines = [
            {"action": a.id, "iteration": i, "device": d, "seconds": 0.01, "peak": a.peak or 0}
            for i in range(count) for a in plan.actions for d in a.devices
        ]  # fmt: skip
        (path / "devices.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return paths


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browsing(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest.fixture
def tab(browser: Tab, runs: list[Path]) -> Tab:
    """The first run's page, with the second one's curves."""
    browser.events.clear()
    browser.look()
    browser.open(write_report(runs[0], others=runs[1:]).as_uri())
    return browser


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The rules of axe-core: of the file that RLFLOW_AXE names, else fetched by npm."""
    named = os.environ.get("RLFLOW_AXE")
    if named is None:
        home = tmp_path_factory.mktemp("axe")
        words = ["npm", "install", "--silent", "--no-fund", "--no-audit", "axe-core@4.14.1"]
        try:
            subprocess.run(words, cwd=home, check=True, capture_output=True, timeout=120)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"npm does not bring axe-core: {error}")
        named = str(home / "node_modules" / "axe-core" / "axe.min.js")
    return Path(named).read_text()


def texts(tab: Tab, selector: str) -> list[str]:
    return tab.run(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")


def test_the_page_draws_without_a_word_and_without_a_network(tab: Tab):
    tab.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    tab.look(dark=True)
    assert [] == tab.complaints()
    asked = {url for url in tab.asked() if not url.startswith("data:")}
    assert all(url.startswith("file:") for url in asked)
    assert 1 == len(asked)


@pytest.mark.parametrize("name", LOOKS)
def test_axe_finds_nothing(tab: Tab, axe: str, name: str):
    tab.look(**LOOKS[name])
    tab.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    tab.run("document.querySelector('#gantt g.span:not(.other)').dispatchEvent("
            "new MouseEvent('click', {bubbles: true}))")  # fmt: skip
    tab.run(axe)
    found = tab.run("axe.run().then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.html)]))")
    assert [] == found
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")


def test_every_action_of_an_iteration_is_a_bar_and_gaps_say_why(
    tab: Tab, split: Plan, runs: list[Path]
):
    told = tab.run("[...document.querySelectorAll('#gantt g.span:not(.other)')]"
                   ".map(g => g.getAttribute('aria-label'))")  # fmt: skip
    for action in split.actions:
        assert any(f": {action.id}, iteration 2: 10 ms" in label for label in told)
    gaps = tab.run("[...document.querySelectorAll('#gantt g.gap')]"
                   ".map(g => g.getAttribute('aria-label'))")  # fmt: skip
    assert any("idle for" in gap and "It waited for: " in gap for gap in gaps)
    # As `rlflow idle` says it: of a gap over the edge of an iteration the part within it.
    printed = idle_iteration(read_run_files(runs[0]), 2)
    for line, each in zip(texts(tab, ".idle li"), printed.devices, strict=True):
        told = re.fullmatch(rf"{re.escape(each.label)} idle ([.\d]+) % of .*", line)
        assert told is not None, line
        assert 100 * each.seconds / printed.seconds == pytest.approx(float(told[1]), abs=0.6)
        name, seconds = next(cause for cause in each.causes if cause[0] is not None)
        told = re.search(rf"([.\d]+) % {re.escape(str(name))}", line)
        assert told is not None, line
        assert 100 * seconds / printed.seconds == pytest.approx(float(told[1]), abs=0.6)
    assert tab.run("document.querySelectorAll('#gantt .held, #gantt .proven').length") > 2


def test_the_keyboard_goes_from_bar_to_bar_selects_and_changes_the_iteration(tab: Tab):
    tab.run("document.querySelector('#gantt [data-key][tabindex=\"0\"]').focus()")
    before = tab.run("document.activeElement.dataset.key")
    tab.press("ArrowRight")
    after = tab.run("document.activeElement.dataset.key")
    assert before != after
    while "gap" in tab.run("document.activeElement.dataset.key"):
        tab.press("ArrowRight")
    action = tab.run("document.activeElement.getAttribute('aria-label').split(': ')[1]")
    tab.press("Enter")
    assert action.startswith(texts(tab, "#detail h3")[0])
    tab.press("PageDown")
    assert "3" == tab.run("document.querySelector('#gantt input[type=number]').value")
    assert tab.run("document.activeElement.dataset.key") is not None


def test_a_selected_action_is_lit_in_plan_and_graph(tab: Tab):
    tab.run("document.querySelector('#plan tr[data-action=\"actor.update\"] button').click()")
    assert ["actor.update"] == texts(tab, "#detail h3")
    lit = texts(tab, ".picture g.node.lit title")
    assert 2 == lit.count("actor.update")
    assert tab.run("document.querySelectorAll('#gantt g.lit').length") >= 1
    assert any("of 6 instances" in text for text in texts(tab, "#detail dd"))


def test_a_search_leaves_what_it_finds(tab: Tab):
    tab.run("(() => { const e = document.querySelector('#gantt input[type=search]');"
            "e.value = 'rollout'; e.dispatchEvent(new Event('input')); })()")  # fmt: skip
    assert tab.run("document.querySelectorAll('#gantt g.span.found').length") >= 1
    assert not tab.run("[...document.querySelectorAll('#gantt g.span:not(.dim)')]"
                       ".some(g => !g.getAttribute('aria-label').includes('rollout'))")  # fmt: skip


def test_curves_of_both_runs_lie_over_each_other(tab: Tab):
    labels = texts(tab, "#curves .u-legend .u-label")
    assert {"first", "second"} <= {label.partition(",")[0] for label in labels}
    count = len(texts(tab, "#curves .panel"))
    tab.run("[...document.querySelectorAll('#curves .names button')]"
            ".find(b => b.textContent.endsWith('policy_loss')).click()")  # fmt: skip
    assert count + 1 == len(texts(tab, "#curves .panel"))


def test_what_is_printed_is_light_and_whole(tab: Tab):
    tab.look(dark=True)
    assert tab.printed().startswith(b"%PDF")
    tab.look(dark=True, media="print")
    assert "rgb(255, 255, 255)" == tab.run("getComputedStyle(document.body).backgroundColor")


def test_a_served_page_shows_what_comes(browser: Tab, runs: list[Path], tmp_path: Path, split):
    run = tmp_path / "live"
    write_run(run, split)
    with serving_page(WatchedRun(run)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            browser.events.clear()
            browser.open(server.address)
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"iteration": 6, "metrics": {"reward/mean": 0.4375}}\n')
            browser.until("document.querySelector('#metrics').textContent.includes('0.4375')")
            assert [] == browser.complaints()
            hosts = {url.split("/")[2] for url in browser.asked() if url.startswith("http")}
            assert {f"127.0.0.1:{server.server_port}"} == hosts
        finally:
            server.shutdown()
            thread.join()


def test_a_thousand_iterations_open_in_two_seconds_and_stay_small(browser, split, tmp_path):
    run = tmp_path / "long"
    write_run(run, split, 1_000)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        more = {
            f"actor.update/figure_{n}": (row["iteration"] * 37 + n) % 101 / 7 for n in range(60)
        }
        row["metrics"] |= more
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    record_samples(run, 1_000, 40)
    page = write_report(run)
    assert page.stat().st_size < LARGEST
    browser.look()
    assert min(browser.open(page.as_uri()) for _ in range(3)) < LONGEST_MS
    assert "25 of 4000 found" == browser.run(
        "document.querySelector('#samples output').textContent"
    )


def record_samples(run: Path, iterations: int, count: int) -> None:
    """So many samples of each iteration, of a hundred words or so."""
    import torch

    for iteration in range(iterations):
        words = [f"{' '.join(str(n * n % 977) for n in range(100))} of {i}" for i in range(count)]
        fields = {
            "group": torch.arange(count) // 8,
            "prompt": text([f"prompt {i // 8}" for i in range(count)]),
            "response": text(words),
            "response_tokens": ragged(torch.arange(count), torch.ones(count, dtype=torch.int64)),
        }
        about = About(
            node="actor.rollout", iteration=iteration, how="every", total=count, graph="g",
            rows_of="actor.rollout",
        )  # fmt: skip
        texts = ("prompt", "response")
        write_edge(run, edge_table(about, fields, np.arange(count), texts=texts))

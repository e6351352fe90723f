from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import common
import pytest
from common import Compared, Environment, Side, between, markdown_table, paired, text_table


def side(*seconds: float, tokens: float = 10.0, peak: float = 1.0) -> Side:
    return Side(seconds=seconds, tokens=(tokens,), peak_mb=peak)


def test_a_side_is_its_median_iteration():
    assert 2.0 == side(1.0, 9.0, 2.0).median


def test_an_iteration_lasts_from_the_end_before_it_to_its_own():
    assert (2.0, 3.0, 4.0) == between([1.0, 3.0, 6.0, 10.0], 1)


def test_warm_up_iterations_are_left_out():
    assert (4.0,) == between([1.0, 3.0, 6.0, 10.0], 3)


def test_the_first_iteration_cannot_be_measured():
    with pytest.raises(ValueError, match="warmup=0"):
        between([1.0, 2.0], 0)


def test_the_ratio_is_the_median_of_the_pairs_and_not_of_the_pool():
    # The second pair ran in a slow hour: both sides took ten times as long.
    ours, theirs = (side(1.0), side(10.0), side(1.0)), (side(2.0), side(40.0), side(2.0))
    found = Compared(case="c", ours=ours, theirs=theirs, target=0.5)
    assert (0.5, 0.25, 0.5) == found.ratios
    assert 0.5 == found.ratio


@pytest.mark.parametrize(("target", "passed"), [(0.5, True), (0.49, False)])
def test_a_ratio_at_the_target_passes(target, passed):
    found = Compared(case="c", ours=(side(1.0),), theirs=(side(2.0),), target=target)
    assert found.passed is passed
    assert ("yes" if passed else "NO") == found.row()[6]


def test_the_row_shows_milliseconds_ratio_tokens_and_memory():
    ours, theirs = (side(0.1, tokens=447, peak=500),), (side(0.2, tokens=450, peak=600),)
    row = Compared(case="2x128", ours=ours, theirs=theirs, target=0.67).row()
    expected = ("2x128", "100.0", "200.0", "0.50", "0.50..0.50", "<= 0.67", "yes")
    assert (*expected, "447 / 450", "500 / 600") == row
    assert len(common.HEADER) == len(row)


def test_json_has_every_second_and_the_figures_of_the_table():
    found = Compared(case="c", ours=(side(1.0, 3.0),), theirs=(side(4.0),), target=0.5)
    data = json.loads(json.dumps(found.as_json()))
    assert [1.0, 3.0] == data["ours"][0]["seconds"]
    assert (data["ratio"], data["passed"]) == (0.5, True)
    assert (data["rlflow_seconds"], data["trl_seconds"]) == (2.0, 4.0)


def test_paired_runs_alternate(capsys):
    order: list[str] = []

    def run(name: str) -> Side:
        order.append(name)
        return side(float(len(order)))

    found = paired("c", lambda: run("a"), lambda: run("b"), pairs=2, target=1.0)
    assert ["a", "b", "a", "b"] == order
    assert [made.median for made in found.ours] == [1.0, 3.0]


def test_the_text_table_lines_up():
    expected = "name   ms\nlong  1.0\nx      22"
    assert expected == text_table(("name", "ms"), [("long", "1.0"), ("x", "22")])


def test_the_markdown_table_has_a_rule_after_the_header():
    expected = "| a | b |\n| --- | ---: |\n| 1 | 2 |"
    assert expected == markdown_table(("a", "b"), [("1", "2")])


def test_an_environment_is_named_by_its_constraints_and_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "HERE", tmp_path)
    (tmp_path / "c.txt").write_text("torch==1")
    first = Environment(name="e", constraints="c.txt", packages=("trl",))
    digest = first.digest()
    other = Environment(name="e", constraints="c.txt", packages=("trl", "psutil"))
    assert digest != other.digest()
    (tmp_path / "c.txt").write_text("torch==2")
    assert digest != first.digest()


def test_a_whole_environment_is_left_alone_and_a_half_one_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "HERE", tmp_path)
    monkeypatch.setattr(common, "CACHE", tmp_path)
    (tmp_path / "c.txt").write_text("torch==1")
    made = []
    monkeypatch.setattr(common.venv, "create", lambda path, **_: (made.append(path), path.mkdir()))
    monkeypatch.setattr(common.subprocess, "run", lambda *_, **__: None)
    environment = Environment(name="e", constraints="c.txt", packages=("trl",))
    for _ in range(3):
        environment.ensure()
    assert [tmp_path / "e"] == made
    (tmp_path / "e" / common.MARK).unlink()
    monkeypatch.setattr(common.venv, "create", lambda path, **_: made.append(path))
    environment.ensure()
    assert 2 == len(made)


def test_a_process_gives_its_peak_memory_and_one_thread(tmp_path):
    """From a small process: a child begins with the peak of the one that starts it."""
    log = tmp_path / "logs" / "log"
    code = "import os; print(os.environ['OMP_NUM_THREADS'])"
    words = f"{[sys.executable, '-c', code]!r}, pathlib.Path({str(log)!r})"
    folder = str(Path(common.__file__).parent)
    small = f"import pathlib, sys; sys.path.insert(0, {folder!r}); import common"
    made = subprocess.run(
        [sys.executable, "-c", f"{small}; print(common.run({words}))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 1 < float(made.stdout) < 1000
    assert "1\n" == log.read_text()


def test_a_process_that_fails_shows_the_end_of_its_log(tmp_path):
    with pytest.raises(SystemExit, match=r"(?s)no luck.*exit code 3"):
        common.run([sys.executable, "-c", "print('no luck'); exit(3)"], tmp_path / "log")


@pytest.mark.slow
def test_the_machine_is_described_with_its_date():
    facts = common.machine()
    assert facts["date"].endswith("+00:00")
    assert {"cpu", "cores", "memory_gb", "commit", "python", "load"} <= set(facts)
    assert facts["products"] in {"mkl", "onednn", "torch"}
    assert f"({' '.join(facts['flags'])}; products by {facts['products']})" in (
        common.markdown_report("Title", facts, [])
    )
    page = common.markdown_report("Title", facts, ["table"], ["note"])
    assert page.startswith("# Title\n\n" + facts["date"])
    assert page.endswith("table\n\n- note\n")

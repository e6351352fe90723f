"""The report and the summary: made from files, whole in themselves, showing what the files say."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlflow.errors import RunDirError, UsageError
from rlflow.report.charts.curves import smooth, window_for
from rlflow.report.interactive.payload import run_labels, thinned
from rlflow.report.report import summary_text, write_report
from rlflow.report.runfiles import continue_line, first_and_last, read_run_files
from rlflow.report.tables import plan_rows, ratio_text
from rlflow.scheduler.plan.plan import Plan
from tests.viz.examples import write_run

VOID = {"meta", "link", "br", "img", "hr"}


def data_of(page: str) -> dict:
    """What the scripts of a page draw."""
    (found,) = re.findall(r'id="data-run">([^<]*)<', page)
    return json.loads(gzip.decompress(base64.b64decode(found)))


class Balance(HTMLParser):
    """Follows tags and fails at one that closes what is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(split: Plan, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("runs") / "ppo-run"
    write_run(path, split)
    return write_report(path).read_text()


def test_the_report_lies_in_the_run_and_the_curves_beside_it(run_dir: Path):
    assert run_dir / "report.html" == write_report(run_dir)
    assert b"\x89PNG" == (run_dir / "curves.png").read_bytes()[:4]
    assert (run_dir / "curves.svg").read_bytes().startswith(b"<?xml")


def test_the_report_may_lie_elsewhere(run_dir: Path, tmp_path: Path):
    assert tmp_path / "r.html" == write_report(run_dir, tmp_path / "r.html")
    assert not (run_dir / "report.html").exists()


def test_the_page_is_whole_in_itself(page: str):
    assert [] == re.findall(
        r"""\s(?:src|href|action)=(?!"#|"data:)[^\s>]*""", page.split("<script", maxsplit=1)[0]
    )
    assert "@import" not in page
    assert "url(" not in page


def test_only_the_scripts_of_the_page_may_run_and_nothing_may_be_fetched(page: str):
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    hashed = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert 2 == len(scripts)
    said = dict(each.strip().split(" ", 1) for each in policy.split(";"))
    assert " ".join(f"'sha256-{each}'" for each in hashed) == said["script-src"]
    assert "'none'" == said["default-src"] == said["connect-src"]
    assert "Permission is hereby granted, free of charge" in scripts[0]


def test_the_page_is_balanced_html(page: str):
    parser = Balance()
    parser.feed(page)
    assert [] == parser.open
    assert {"h1", "table", "svg", "figure"} <= parser.seen


@pytest.mark.parametrize(
    "text",
    [
        "0.300 → 0.600",  # means of the first and the last three of 0.2, 0.3, ... 0.7
        "0.250 → 0.750",
        "actor.update/policy_loss", "-0.0625",
        "10.0 ms",  # every action of the synthetic run
        "placement split on cpu:2",
        "0123456789ab", "with changes", "torch 2.13.0",
        "&#x27;pipelines/a b.py&#x27;",
        "reshard", "actor.rollout reads v[i+1] on gen",
        "the plan as a picture", "the plan as printed",
    ],
)  # fmt: skip
def test_the_page_shows_the_figures_of_the_files(page: str, text: str):
    assert text in page


def test_what_a_user_wrote_is_escaped(page: str):
    assert "&lt;script&gt;" in page


def test_the_iteration_of_the_chart_may_be_named(run_dir: Path):
    begin = [data_of(write_report(run_dir, iteration=i).read_text()) for i in (None, 3)]
    assert [2, 3] == [data["timeline"]["begin"] for data in begin]
    with pytest.raises(UsageError, match="iterations 0 to 5"):
        write_report(run_dir, iteration=6)


def test_predicted_stands_beside_measured(run_dir: Path):
    rows = {row[2]: row for row in plan_rows(read_run_files(run_dir))}
    plan = json.loads((run_dir / "plan.json").read_text())
    predicted = {a["id"]: a["cost"]["seconds"] for a in plan["actions"]}
    assert "10.0 ms" == rows["actor.update"][5]
    assert f"{0.01 / predicted['actor.update']:.2f}" == rows["actor.update"][6]


def test_a_ratio_that_is_not_known_is_a_dash():
    assert ["2.00", "-", "-", "-"] == [
        ratio_text(*pair) for pair in ((2.0, 1.0), (None, 1.0), (1.0, None), (1.0, 0.0))
    ]


@pytest.mark.rows(2)
@pytest.mark.parametrize("missing", ["metrics.jsonl", "plan.json", "graph.json", "plan.txt"])
def test_a_run_that_lacks_a_file_is_still_reported(run_dir: Path, missing: str):
    (run_dir / missing).unlink()
    assert "</html>" in write_report(run_dir).read_text()
    assert "continue:" in summary_text(run_dir)


def test_a_run_without_spans_is_still_reported(run_dir: Path):
    (run_dir / "spans" / "main.jsonl").unlink()
    page = write_report(run_dir).read_text()
    assert data_of(page)["timeline"] is None
    assert "Where the time went" not in page
    assert "Learning curves" in page


def test_a_torn_last_line_is_left_out_and_another_is_an_error(run_dir: Path):
    path = run_dir / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"iteration": 6, "met')
    assert 6 == len(read_run_files(run_dir).metrics)
    path.write_text('{"iteration"\n' + whole)
    with pytest.raises(RunDirError, match="line 1"):
        read_run_files(run_dir)


@pytest.mark.parametrize("content", ["{", "[]", '{"name": "x"}'])
def test_a_damaged_run_file_is_named(run_dir: Path, content: str):
    (run_dir / "run.json").write_text(content)
    with pytest.raises(RunDirError, match=r"run\.json is damaged"):
        write_report(run_dir)


def test_a_directory_that_is_no_run_names_those_beside_it(run_dir: Path):
    with pytest.raises(RunDirError, match="did you mean 'ppo-run'"):
        write_report(run_dir.parent / "ppo-rum")


def test_the_summary_is_short_and_says_how_to_continue(run_dir: Path):
    lines = summary_text(run_dir).splitlines()
    assert 10 <= len(lines) <= 18
    assert lines[0].startswith("ppo   6 iterations   placement split on cpu:2")
    assert any("0.300 → 0.600" in line for line in lines)
    assert any("0.250 → 0.750" in line for line in lines)
    assert any("gen[1] idle" in line for line in lines)
    assert (
        "continue: rlflow run 'pipelines/a b.py' --placement split --iterations 12 "
        f"--resume {run_dir}"
    ) == lines[-1]


def test_a_run_is_continued_with_its_own_options(run_dir: Path):
    run = json.loads((run_dir / "run.json").read_text())
    run["again"] = ["run", "p.py", "--set", "a=1"]
    (run_dir / "run.json").write_text(json.dumps(run))
    assert f"rlflow run p.py --set a=1 --iterations 12 --resume {run_dir}" == continue_line(
        read_run_files(run_dir)
    )


def test_the_evaluation_after_the_last_iteration_is_none(run_dir: Path):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "metrics": {"eval/reward": 0.875}}\n')
    text = summary_text(run_dir)
    assert "ppo   6 iterations " in text
    assert "0.250 → 0.875" in text


def test_a_pipeline_without_rewards_draws_its_loss(run_dir: Path):
    rows = [{"iteration": i, "metrics": {"sft.update/loss": 2.0 - i}} for i in range(3)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ["sft.update/loss"] == data_of(write_report(run_dir).read_text())["headline"]


def test_curves_of_other_runs_lie_over_those_of_the_first(split: Plan, run_dir: Path):
    other = run_dir.parent / "longer"
    write_run(other, split, 9)
    data = data_of(write_report(run_dir, others=[other]).read_text())
    assert ["ppo-run", "longer"] == data["runs"]
    assert [6, 9] == [len(curves["reward/mean"][0]) for curves in data["curves"]]
    assert 6 == len(data["timeline"]["iterations"])


def test_runs_of_one_name_are_told_apart_by_their_folders(split: Plan, tmp_path: Path):
    paths = [tmp_path / folder / "run" for folder in ("a", "b")]
    for path in paths:
        write_run(path, split, 1)
    assert ["a/run", "b/run"] == run_labels([read_run_files(path) for path in paths])


def test_a_long_curve_keeps_its_ends_and_peaks():
    points = [(i, math.sin(i / 9)) for i in range(10_000)]
    points[4321] = (4321, 50.0)
    points[8765] = (8765, -50.0)
    few = thinned(points, 200)
    assert len(few) <= 200
    assert sorted(few) == few
    assert {points[0], points[-1], points[4321], points[8765]} <= set(few)
    assert points[:100] == thinned(points[:100], 100)


def test_what_is_no_number_is_a_hole(run_dir: Path):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "metrics": {"reward/mean": NaN}}\n')
    data = data_of(write_report(run_dir).read_text())
    assert data["curves"][0]["reward/mean"][1][-1] is None


def test_ends_are_means_of_at_most_ten_and_half():
    assert (0.5, 98.5, 2) == first_and_last([(0, 0.0), (1, 1.0), (2, 98.0), (3, 99.0)])
    assert (4.5, 94.5, 10) == first_and_last([(i, float(i)) for i in range(100)])
    assert (7.0, 7.0, 1) == first_and_last([(0, 7.0)])


def test_smoothing_keeps_length_and_constants():
    assert [2.0, 3.0, 4.0] == smooth([1.0, 3.0, 5.0], 3)
    assert [7.0] * 9 == smooth([7.0] * 9, 5)
    assert [3, 7, 15] == [window_for(count) for count in (6, 100, 5000)]

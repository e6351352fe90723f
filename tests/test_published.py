"""The published results: every row has its place and setting, and what counts has a plan."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).resolve().parent.parent / "benchmarks")
sys.path.insert(0, BENCHMARKS)
try:
    from published import encode, rows
finally:
    sys.path.remove(BENCHMARKS)

PUBLISHED = rows.load()
COUNTED = [setting for setting in PUBLISHED.settings if not setting.why_not]
PAGE = (Path(BENCHMARKS) / "results" / "published.md").read_text(encoding="utf-8")
QUICK = ("verl_nccl_0b6", "vllm_72b_128_128")


def changed(name: str, **said: object) -> list[str]:
    """What is wrong with the data once a setting says something else; None takes it away."""
    (setting,) = [one for one in PUBLISHED.settings if one.name == name]
    other = {**copy.deepcopy(dict(setting.said)), **said}
    other = {key: value for key, value in other.items() if value is not None}
    settings = (rows.Setting(said=other),)
    return rows.problems(rows.Published(sources=PUBLISHED.sources, settings=settings))


def test_rows_and_sources_are_as_many_as_asked_for():
    assert sum(len(setting.rows) for setting in COUNTED) >= 60
    assert len({setting.said["source"] for setting in COUNTED}) >= 8


def test_a_counted_row_says_what_decides():
    assert all(setting.can_be_encoded for setting in COUNTED)
    assert changed("nemo_v05_8b_h100_16") == []
    for key in ("response_mean", "shape", "prompts", "prompt_tokens"):
        (wrong,) = changed("nemo_v05_8b_h100_16", **{key: None})
        assert "what decides is not said" in wrong


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"place": None}, "no place"),
        ({"source": "hearsay"}, "no source 'hearsay'"),
        ({"unknown": None}, "no list unknown"),
        ({"algorithm": "dpo"}, "no algorithm 'dpo'"),
        ({"placement": {"train_ep": 8}}, "dispatch None"),
        ({"measured": [{"what": "iteration", "value": 1, "unit": "min"}]}, "iteration in 'min'"),
        ({"measured": [{"what": "speed", "value": 1, "unit": "s"}]}, "no quantity 'speed'"),
        (
            {"measured": [{"what": "sync", "value": 3, "low": 4, "high": 5, "unit": "s"}]},
            "sync of 3.0 is not in 4.0 to 5.0",
        ),
    ],
)
def test_what_is_wrong_is_told(said, told):
    assert any(told in wrong for wrong in changed("nemo_v05_8b_h100_16", **said))


def test_a_row_without_a_unit_is_refused(tmp_path):
    text = rows.FILE.read_text(encoding="utf-8").replace(', unit = "s"', "", 1)
    (tmp_path / "results.toml").write_text(text, encoding="utf-8")
    with pytest.raises(KeyError, match="unit"):
        rows.load(tmp_path / "results.toml")


@pytest.mark.parametrize("setting", COUNTED, ids=lambda setting: setting.name)
def test_a_counted_setting_is_a_graph_and_a_placement(setting):
    graph = encode.published.trace(encode.config_of(setting))
    assert graph.node("actor.rollout")
    assert encode.placement_of(setting).num_devices() == encode.devices_of(setting)


def test_a_mean_length_reaches_the_plan():
    (setting,) = [one for one in COUNTED if one.name == "vllm_72b_128_128"]
    many = {**setting.said, "samples": 8, "response_limit": 2048}
    both = [rows.Setting(said={**many, "response_mean": mean}) for mean in (200, 400)]
    short, long = (encode.predicted(one).of("generation") for one in both)
    assert 1.5 < long / short < 2.5


def test_a_setting_has_its_systems_dispatch():
    (setting,) = [one for one in COUNTED if one.name == "nemo_v05_30a_h100_32"]
    once = rows.Setting(said={**setting.said, "dispatch": "rank"})
    theirs, own = (encode.predicted(one).of("training") for one in (setting, once))
    # All-to-alls are the lesser part of it, and get a third shorter.
    assert 1.02 < theirs / own < 1.4


@pytest.mark.parametrize("name", QUICK)
def test_a_counted_setting_has_predictions(name):
    (setting,) = [one for one in COUNTED if one.name == name]
    found = encode.predicted(setting)
    assert not found.refused
    assert all(found.of(row.what) for row in setting.rows)


def summary() -> dict[str, tuple[str, str]]:
    """The committed page's summary: what is now, and the bar."""
    lines = (PAGE.split("## By quantity")[0]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return {name: (now, bar) for name, now, bar in cells}


def test_the_summary_does_not_get_worse():
    found = summary()
    # 0.21 before plans shared the tokens of norms along tp, which those systems do as well; 0.25
    # while vLLM had 128 rows at once in plans, which made rollouts as much too long as the rest is
    # too short. Ratios of placements are nearer since: 1.31 of 1.31, where it was 1.09.
    assert float(found["median of abs log2(predicted / measured)"][0]) <= 0.3
    assert float(found["worst"][0]) <= 0.9
    assert float(found["Spearman of iterations"][0]) >= 0.9
    assert found["pairs of placements with the cheaper one right"][0] == "10 of 10"
    assert found["counted rows without a prediction"][0] == "0"
    assert found["memory verdicts right"][0] == "4 of 4"


@pytest.mark.parametrize("name", QUICK)
def test_the_page_has_what_plans_predict_now(name):
    (setting,) = [one for one in COUNTED if one.name == name]
    found = encode.predicted(setting)
    for row in setting.rows:
        said = f"{found.of(row.what):.1f} s | {found.of(row.what) / row.value:.2f}"
        (line,) = [x for x in PAGE.splitlines() if x.startswith(f"| {name} | {row.what} |")]
        assert said in line


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_counted_row_has_a_prediction():
    for setting in COUNTED:
        found = encode.predicted(setting)
        assert not found.refused, setting.name
        assert all(found.of(row.what) for row in setting.rows), setting.name


def test_tune_is_never_worse_than_what_was_published():
    """By the committed page, of every placement whose iteration counts."""
    page = (Path(BENCHMARKS) / "results" / "published_tuned.md").read_text(encoding="utf-8")
    cells = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][2:]
    found = {name.strip("| "): float(times) for name, _, _, times, *_ in cells}
    counted = {s.name for s in COUNTED if any(row.what == "iteration" for row in s.rows)}
    assert counted == set(found)
    assert min(found.values()) >= 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_beats_a_published_placement_as_the_page_says():
    (setting,) = [one for one in COUNTED if one.name == "rlinf_1b5_8"]
    found = encode.tuned(setting)
    ((_, own),) = found.written
    assert encode.PUBLISHED == own.name
    assert found.best.period <= own.period

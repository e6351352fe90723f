"""`rlflow recipes` and `rlflow init`: every recipe written, checked and planned."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT, TINY

RECIPES = ("grpo", "ppo", "online_dpo", "sft")
SEVEN = "Qwen/Qwen2.5-7B-Instruct"
GPUS = ("--devices", "h100:8", "--model-shape", "qwen2.5-7b")
ROW = {"question": "What is 2 + 3?", "solution": "5"}
COLUMNS = ("--prompt-column", "question", "--answer-column", "solution")


@pytest.fixture(autouse=True)
def beside_rows(tmp_path, monkeypatch):
    """The working directory, with rows whose columns have names of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "my.jsonl").write_text(f"{json.dumps(ROW)}\n" * 4)
    pq.write_table(pa.Table.from_pylist([ROW] * 4), tmp_path / "my.parquet")
    return tmp_path


def init(rlflow, name, *words, recipe="grpo", data="my.jsonl", model=SEVEN, columns=COLUMNS):
    asked = ("--recipe", recipe, "--model", model, "--data", data)
    return rlflow("init", name, *asked, *columns, *words)


def linted(*paths):
    """What ruff says of files under the rules of this repository, in check and in format."""
    ruff = [sys.executable, "-m", "ruff"]
    config = ["--config", str(ROOT / "pyproject.toml"), *map(str, paths)]
    runs = (["check", "-q"], ["format", "-q", "--diff"])
    return "".join(
        subprocess.run([*ruff, *words, *config], capture_output=True, text=True, check=False).stdout
        for words in runs
    )


def test_recipes_are_listed_with_what_they_need(rlflow):
    listed = json.loads(rlflow("recipes", "--json").out)
    lines = rlflow("recipes").out.splitlines()

    assert RECIPES == tuple(recipe["name"] for recipe in listed)
    assert all(recipe["what"] and recipe["needs"] for recipe in listed)
    assert [line.split()[0] for line in lines] == list(RECIPES)
    assert max(map(len, lines)) <= 120


@pytest.mark.rows(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_written_and_planned_in_every_placement(recipe, rlflow, beside_rows):
    written = init(rlflow, "mine", recipe=recipe)
    assert 0 == written.code, written.err
    assert "wrote mine.py" in written.err

    checked = json.loads(rlflow("check", "mine.py", *GPUS, "--json").out)
    assert {"one", "colocate"} <= set(checked["placements"])
    (line,) = [line for line in written.err.splitlines() if line.startswith("next: ")]
    planned = rlflow(*line.removeprefix("next: rlflow ").split())
    assert 0 == planned.code, planned.err
    assert "on h100:8" in planned.out


def test_what_is_written_is_as_linters_want_it(rlflow, beside_rows):
    evaluated = ("--eval-data", "my.jsonl")
    for recipe in RECIPES:
        assert 0 == init(rlflow, f"a_{recipe}", recipe=recipe).code
        assert 0 == init(rlflow, f"b_{recipe}", *evaluated, recipe=recipe).code
    hub = ("--subset", "main", "--eval-data", "openai/gsm8k")
    assert 0 == init(rlflow, "of_the_hub", *hub, data="openai/gsm8k").code
    deep = Path("a" * 60, "b" * 60, "my.jsonl")
    deep.parent.mkdir(parents=True)
    deep.write_text((beside_rows / "my.jsonl").read_text())
    assert 0 == init(rlflow, "far_away", data=str(deep)).code

    assert "" == linted(*beside_rows.glob("*.py"))


def test_a_program_reads_what_was_written_and_checked(rlflow, beside_rows):
    (beside_rows / "apart").mkdir()

    found = json.loads(init(rlflow, "apart/mine", "--json").out)

    assert ("apart/mine.py", "grpo") == (found["file"], found["recipe"])
    assert (beside_rows / "apart" / "mine.py").is_file()
    assert {"one", "split", "sglang"} <= set(found["check"]["placements"])


@pytest.mark.slow
def test_what_is_written_is_as_mypy_wants_it(rlflow, beside_rows):
    for recipe in RECIPES:
        assert 0 == init(rlflow, f"a_{recipe}", "--eval-data", "my.jsonl", recipe=recipe).code
    files = sorted(str(path) for path in beside_rows.glob("*.py"))
    words = ["--config-file", str(ROOT / "pyproject.toml")]

    found = subprocess.run(
        [sys.executable, "-m", "mypy", *words, *files],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )

    assert f"no issues found in {len(RECIPES)} source files" in found.stdout


def test_held_out_rows_are_evaluated(rlflow, beside_rows):
    init(rlflow, "mine", "--eval-data", "my.parquet", data="my.parquet")
    text = (beside_rows / "mine.py").read_text()

    assert 'eval_data: str = "my.parquet"' in text
    assert "rf.data.parquet(" in text
    assert "eval" in rlflow("plan", "mine.py", "--placement", "one", *GPUS).out


def test_a_model_is_asked_as_its_files_say(rlflow, beside_rows):
    shutil.copytree(TINY, "plain")
    config = Path("plain/tokenizer_config.json")
    without = {k: v for k, v in json.loads(config.read_text()).items() if k != "chat_template"}
    config.write_text(json.dumps(without))
    written = init(rlflow, "mine", model="plain")

    assert written.code == 0
    assert "chat: bool = False" in (beside_rows / "mine.py").read_text()
    assert "max_new_tokens: int = 64\n" in (beside_rows / "mine.py").read_text()


def test_the_reward_pays_numbers_and_texts(rlflow, beside_rows):
    init(rlflow, "mine")
    source = (beside_rows / "mine.py").read_text()
    start = source.index("def correct")
    names = {}
    imports = "from rlflow.data import last_number, same_number\n"
    exec(imports + source[start : source.index("def rows")], names)

    paid = [("it is 5.", "#### 5"), ("it is 6", "5"), ("none", "5"), (" blue ", "blue")]
    assert [1.0, 0.0, 0.0, 1.0] == [names["correct"](*each) for each in paid]


def test_a_file_that_is_there_stays_unless_forced(rlflow, beside_rows):
    (beside_rows / "mine.py").write_text("kept = True\n")

    refused = init(rlflow, "mine")
    assert (2, True) == (refused.code, "E350" in refused.err)
    assert "kept = True\n" == (beside_rows / "mine.py").read_text()
    assert 0 == init(rlflow, "mine.py", "--force").code
    assert "def mine(" in (beside_rows / "mine.py").read_text()


REFUSED = [
    ("E351", {"name": "my-run"}, "rlflow init my_run"),
    ("E351", {"name": "torch"}, "rlflow init my_torch"),
    ("E352", {"recipe": "gpro"}, "--recipe grpo"),
    ("E353", {"columns": COLUMNS[2:]}, "--prompt-column question"),
    ("E353", {"columns": (*COLUMNS[:3], "solutoin")}, "--answer-column solution"),
    ("E353", {"columns": (*COLUMNS[:3], "question")}, "two columns"),
    ("E354", {"data": "my.csv"}, ".jsonl or .parquet"),
    ("E601", {"data": "mine.jsonl"}, "did you mean 'my.jsonl'"),
    ("E204", {"model": "./nowhere"}, "a directory with config.json"),
]


@pytest.mark.parametrize(("code", "changes", "says"), REFUSED)
def test_nothing_is_written_for_what_is_not_there(code, changes, says, rlflow, beside_rows):
    words = {"name": "mine", **changes}
    refused = init(rlflow, words.pop("name"), **words)

    assert 2 == refused.code
    assert f"error[{code}]" in refused.err
    assert says in refused.err
    assert [] == list(beside_rows.glob("*.py"))


def test_rows_and_held_out_rows_are_of_one_kind(rlflow, beside_rows):
    refused = init(rlflow, "mine", "--eval-data", "openai/gsm8k")

    assert "error[E354]" in refused.err
    assert [] == list(beside_rows.glob("*.py"))

"""Hugging Face data sets, on local folders and files and without a network."""

from __future__ import annotations

import json
import sys

import pytest

import rlflow.data as data
from rlflow.errors import DataError, UsageError

ROWS = [{"question": f"{i}+{i}=", "answer": f"#### {i + i}"} for i in range(5)]


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """A cache of its own, a working directory of its own, and no hub."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    datasets.disable_progress_bars()
    return tmp_path


def local_form(form, folder):
    """The rows as the path of a folder or file of this form, and its split."""
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    if form == "saved":
        table.save_to_disk(folder / "set")
    elif form == "saved splits":
        datasets.DatasetDict(train=table, test=table).save_to_disk(folder / "set")
    elif form == "parquet file":
        table.to_parquet(folder / "set.parquet")
        return "set.parquet"
    else:
        (folder / "set").mkdir()
        text = "".join(f"{json.dumps(row)}\n" for row in ROWS)
        (folder / "set" / "train.jsonl").write_text(text)
        return "set/train.jsonl" if form == "jsonl file" else "set"
    return "set"


def message(source):
    rows = [line for finding in source.check() for line in finding.lines()]
    return "\n".join(line for line in rows if "test_hub.py:" not in line)


@pytest.mark.parametrize("form", ["folder", "jsonl file", "parquet file", "saved", "saved splits"])
def test_local_data_sets(form, offline):
    source = data.huggingface(local_form(form, offline), prompt="question", limit=4)
    wanted = [{"prompt": row["question"], "answer": row["answer"]} for row in ROWS[:4]]

    assert not source.remote
    assert source.size() is None
    assert ("prompt", "answer") == source.columns
    assert wanted == list(source.rows())
    assert 4 == source.size()
    assert [] == source.check() == source.notes()
    assert sorted(row["prompt"] for row in wanted) == sorted(
        row["prompt"] for row in source.batch(0, 4, 0)
    )


def test_declared_columns_need_no_loading():
    source = data.huggingface(
        "openai/gsm8k", subset="main", columns=["prompt", "answer"], prompt="question"
    )

    assert source.remote
    assert ("prompt", "answer") == source.columns
    assert (
        "huggingface openai/gsm8k main, train split (prompt, answer; question as prompt)"
        == source.describe()
    )


def test_without_a_network():
    source = data.huggingface("openai/gsm8k", subset="main", columns=["prompt"])

    assert (
        "error[E607]: cannot load openai/gsm8k (train)\n"
        "  got          Couldn't reach 'openai/gsm8k' on the Hub (OfflineModeIsEnabled)\n"
        "  expected     a data set of the hub and a network, or a local folder or file\n"
        "  fix          hf download --repo-type dataset openai/gsm8k"
    ) == message(source)
    with pytest.raises(DataError, match="E607"):
        source.rows()


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)

    assert (
        "error[E607]: openai/gsm8k (train) needs the package 'datasets'\n"
        "  got          it is not installed\n"
        "  fix          pip install -e '.[datasets]'"
    ) == message(data.huggingface("openai/gsm8k", columns=["prompt"]))


@pytest.mark.parametrize("form", ["folder", "saved splits"])
def test_an_unknown_split(form, offline):
    splits = "train" if form == "folder" else "train, test"
    message_lines = message(data.huggingface(local_form(form, offline), "trian")).splitlines()

    assert [
        "error[E608]: set has no split 'trian'",
        f"  got          splits {splits}",
        "  expected     one of them",
        "  did you mean 'train'",
        '  fix          split="train"',
    ] == message_lines


def test_a_missing_column(offline):
    source = data.huggingface(local_form("folder", offline), columns=["prompt", "anser"])

    assert (
        "error[E603]: set (train) has no column 'prompt'\n"
        "  got          columns question, answer\n"
        "  expected     a column 'prompt'\n"
        "error[E603]: set (train) has no column 'anser'\n"
        "  got          columns question, answer\n"
        "  expected     a column 'anser'\n"
        "  did you mean 'answer'\n"
        '  fix          rename={"answer": "anser"}'
    ) == message(source)


def test_a_broken_local_file(offline):
    (offline / "a.jsonl").write_text('{"prompt": \n')
    (finding,) = data.huggingface("a.jsonl").check()

    assert ("E607", "cannot load a.jsonl (train)") == (finding.code, finding.what)
    assert "a data set in a.jsonl" == finding.expected


def test_a_file_of_an_unknown_format(offline):
    (offline / "a.txt").touch()
    with pytest.raises(UsageError, match=r"E608.*no format is known for 'a.txt'"):
        data.huggingface("a.txt")

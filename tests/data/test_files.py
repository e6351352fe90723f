"""JSON Lines and Parquet: what is read, and the exact words for what cannot be."""

from __future__ import annotations

import json
import os

import pytest

import rlflow.data as data
from rlflow.data import tables
from rlflow.errors import DataError, UsageError

GOOD = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
either = pytest.mark.parametrize("kind", ["jsonl", "parquet"])
BELOW = "a file below the working directory or a folder above the pipeline file"
CHAT = [{"role": "user", "content": "1+1?"}]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines_file(folder, *lines, name="a.jsonl"):
    rows = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
    raw = [row.encode() if isinstance(row, str) else row for row in rows]
    (folder / name).write_bytes(b"\n".join(raw) + b"\n")
    return name


def parquet_file(folder, columns, name="a.parquet"):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), folder / name)
    return name


def write(kind, folder, rows):
    """The same rows in either format, as a source of them."""
    if kind == "jsonl":
        return lines_file(folder, *rows)
    return parquet_file(folder, {key: [row[key] for row in rows] for key in rows[0]})


def message(source):
    """What `check` says, without the line of this file that declared the source."""
    rows = [line for finding in source.check() for line in finding.lines()]
    return "\n".join(line for line in rows if "test_files.py:" not in line)


@either
def test_rows_come_back(kind, folder):
    source = getattr(data, kind)(write(kind, folder, GOOD))

    assert ("prompt", "answer") == source.columns
    assert (2, GOOD) == (source.size(), list(source.rows()))
    assert [] == source.check() == source.notes()
    assert f"{kind} a.{kind}" == source.describe()


@either
def test_renamed_kept_and_limited(kind, folder):
    rows = [{"question": f"{i}", "answer": f"{i}", "x": 0} for i in range(4)]
    path = write(kind, folder, rows)
    source = getattr(data, kind)(
        path, columns=["prompt", "gold"], prompt="question", rename={"answer": "gold"}, limit=3
    )

    assert [{"prompt": f"{i}", "gold": f"{i}"} for i in range(3)] == list(source.rows())
    assert (3, ("prompt", "gold")) == (source.size(), source.columns)
    assert [] == source.check()
    assert (
        f"{kind} {path} (prompt, gold; answer as gold, question as prompt; first 3)"
        == source.describe()
    )


@either
def test_renamed_without_declared_columns(kind, folder):
    path = write(kind, folder, [{"question": "1", "answer": "2"}])
    source = getattr(data, kind)(path, prompt="question")

    assert ("prompt", "answer") == source.columns
    assert [{"prompt": "1", "answer": "2"}] == list(source.rows())


@either
def test_two_columns_swap_names(kind, folder):
    path = write(kind, folder, [{"prompt": "1", "answer": "2"}])
    source = getattr(data, kind)(path, rename={"prompt": "answer", "answer": "prompt"})

    assert [{"prompt": "2", "answer": "1"}] == list(source.rows())


@either
def test_a_prompt_of_chat_messages(kind, folder):
    path = write(kind, folder, [{"prompt": CHAT}])

    assert [{"prompt": CHAT}] == list(getattr(data, kind)(path).rows())
    assert [] == getattr(data, kind)(path).check()


@either
def test_a_large_file_is_checked_in_part_and_says_so(kind, folder, monkeypatch):
    monkeypatch.setattr(tables, "WHOLE_BYTES", 10)
    monkeypatch.setattr(tables, "CHECKED_ROWS", 3)
    bad_last = [{"prompt": "x"}] * 3 + [{"prompt": ""}]
    source = getattr(data, kind)(write(kind, folder, bad_last))

    assert [] == source.check()
    assert [f"{kind} a.{kind}: checked the first 3 rows only, of 0 MB"] == source.notes()
    with pytest.raises(DataError, match="an empty text"):
        list(source.rows())


@either
def test_a_missing_file(kind, folder):
    (folder / f"train.{kind}").touch()
    source = getattr(data, kind)(f"trian.{kind}", columns=["prompt"])

    assert ("prompt",) == source.columns
    assert source.size() is None
    assert (
        f"error[E601]: no file 'trian.{kind}'\n"
        f"  got          . holds train.{kind}\n"
        f"  expected     {BELOW}\n"
        f"  did you mean 'train.{kind}'"
    ) == message(source)
    with pytest.raises(UsageError, match="E601"):
        _ = getattr(data, kind)("trian").columns
    with pytest.raises(DataError, match="E601"):
        source.rows()


@either
@pytest.mark.timeout(20)
def test_a_pipe(kind, folder):
    os.mkfifo(folder / "data")

    assert "it is a pipe or a device" in message(getattr(data, kind)("data"))


@either
def test_a_folder(kind, folder):
    (folder / "data").mkdir()

    assert (
        "error[E601]: cannot read data\n"
        "  got          it is a folder\n"
        "  expected     a file of this format that this user may read"
    ) == message(getattr(data, kind)("data"))


@either
def test_an_empty_file(kind, folder):
    path = lines_file(folder, "", " ") if kind == "jsonl" else None
    path = path or parquet_file(folder, {"prompt": []})
    source = getattr(data, kind)(path)

    assert (
        f"error[E604]: no rows in {kind} {path}\n"
        "  got          0 rows\n"
        "  expected     at least one row"
    ) == message(source)
    with pytest.raises(DataError, match="E604"):
        source.rows()


@either
def test_two_columns_of_one_name(kind, folder):
    path = write(kind, folder, [{"prompt": "1", "question": "2"}])

    assert (
        "error[E609]: two columns would be called 'prompt'\n"
        "  got          'question' renamed to 'prompt', beside a column 'prompt'\n"
        "  expected     one column of each name\n"
        '  fix          rename={"question": "prompt", "prompt": "prompt_2"}'
    ) == message(getattr(data, kind)(path, prompt="question"))
    with pytest.raises(UsageError, match="E609"):
        _ = getattr(data, kind)(path, prompt="question").columns
    chosen = getattr(data, kind)(path, prompt="question", columns=["prompt"])
    assert [{"prompt": "2"}] == list(chosen.rows())


@either
def test_the_reserved_column(kind, folder):
    path = write(kind, folder, [{"prompt": "1", "row_id": 7}])

    assert (
        "error[E609]: a column is called 'row_id', which rlflow adds itself\n"
        "  got          columns prompt, row_id\n"
        "  expected     any other name\n"
        '  fix          rename={"row_id": "id"}'
    ) == message(getattr(data, kind)(path))


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"limit": 0}, "limit=0 leaves no rows"),
        ({"rename": {"a": "x", "b": "x"}}, "two columns are renamed to 'x'"),
        (
            {"prompt": "q", "rename": {"q": "question"}},
            "column 'q' is the prompt and renamed to 'question'",
        ),
        ({"prompt": "q", "columns": ["q"]}, "column 'q' is renamed to 'prompt'"),
    ],
)
@either
def test_arguments_that_cannot_be_right(kind, arguments, what):
    with pytest.raises(UsageError) as error:
        getattr(data, kind)("a", **arguments)

    assert f"error[E608]: {what}" == str(error.value).splitlines()[0]


def test_a_broken_line(folder):
    path = lines_file(folder, GOOD[0], "", '{"prompt": "1+1=", "answer": 2')
    source = data.jsonl(path)

    assert (
        "error[E602]: line 3 of a.jsonl is not a JSON object\n"
        '  a.jsonl:3   {"prompt": "1+1=", "answer": 2\n'
        "  got          Expecting ',' delimiter at column 31\n"
        "  expected     one JSON object on each line"
    ) == message(source)
    with pytest.raises(DataError, match=r"a\.jsonl:3"):
        source.rows()


def test_a_long_broken_line_is_shown_around_the_break(folder):
    path = lines_file(folder, '{"prompt": "' + "x" * 500 + '", oops, ' + "y" * 500 + "}")
    (finding,) = data.jsonl(path).check()

    assert "Expecting property name enclosed in double quotes at column 516" == finding.got
    assert f'...{"x" * 37}", oops, {"y" * 34}...' == finding.where.text


def test_every_broken_line_is_counted(folder):
    source = data.jsonl(lines_file(folder, *["{"] * 7, GOOD[0], '{"prompt": 3}', "}"))
    whats = [finding.what for finding in source.check()]

    assert ("prompt", "answer") == source.columns
    assert [
        "line 1 of a.jsonl is not a JSON object",
        "line 2 of a.jsonl is not a JSON object",
        "line 3 of a.jsonl is not a JSON object (and 5 more of this kind)",
        "line 9 of a.jsonl has no 'answer'",
    ] == whats


def test_a_json_array_gets_the_line_that_converts_it(folder):
    path = lines_file(folder, json.dumps(GOOD))

    assert (
        "error[E605]: line 1 of a.jsonl is not a JSON object\n"
        '  a.jsonl:1   [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]\n'
        "  got          a JSON list\n"
        "  expected     one JSON object on each line\n"
        "  fix          jq -c '.[]' a.jsonl > a.lines.jsonl"
    ) == message(data.jsonl(path))


def test_a_missing_column(folder):
    path = lines_file(folder, {"prompt": "1", "anser": "2"})

    assert (
        "error[E603]: line 1 of a.jsonl has no 'answer'\n"
        '  a.jsonl:1   {"prompt": "1", "anser": "2"}\n'
        "  got          columns prompt, anser\n"
        "  expected     a value for 'answer' in every row\n"
        "  did you mean 'anser'\n"
        '  fix          rename={"anser": "answer"}'
    ) == message(data.jsonl(path, columns=["prompt", "answer"]))


def test_a_column_to_rename_that_is_missing(folder):
    source = data.jsonl(lines_file(folder, {"Question": "1"}), prompt="question")

    assert (
        "error[E603]: line 1 of a.jsonl has no 'question'\n"
        '  a.jsonl:1   {"Question": "1"}\n'
        "  got          columns Question\n"
        "  expected     a value for 'question' in every row\n"
        "  did you mean 'Question'\n"
        '  fix          prompt="Question"'
    ) == message(source)


def test_null_is_a_missing_value(folder):
    source = data.jsonl(lines_file(folder, GOOD[0], {"prompt": "1", "answer": None}))

    assert (
        "error[E603]: line 2 of a.jsonl has no 'answer'\n"
        '  a.jsonl:2   {"prompt": "1", "answer": null}\n'
        "  got          'answer' is null\n"
        "  expected     a value for 'answer' in every row"
    ) == message(source)


@pytest.mark.parametrize(
    ("prompt", "got"),
    [
        (12, "int 12"),
        ("", "an empty text"),
        ([], "an empty list"),
        ([{"role": "user"}], "message 1 is {'role': 'user'}"),
        ([*CHAT, "hello"], "message 2 is 'hello'"),
        ({"content": "x" * 99}, f"dict {{'content': '{'x' * 62}..."),
    ],
)
def test_what_is_no_prompt(folder, prompt, got):
    (finding,) = data.jsonl(lines_file(folder, {"prompt": prompt})).check()

    assert ("E605", "line 1 of a.jsonl has a 'prompt' that is no prompt") == (
        finding.code,
        finding.what,
    )
    assert got == finding.got


def test_not_utf8(folder):
    path = lines_file(folder, GOOD[0], b'{"prompt": "caf\xe9"}')

    assert (
        "error[E606]: line 2 of a.jsonl is not UTF-8\n"
        '  a.jsonl:2   {"prompt": "caf\ufffd"}\n'
        "  got          byte 0xe9 at column 16\n"
        "  expected     UTF-8\n"
        "  fix          iconv -f LATIN1 -t UTF-8 a.jsonl > a.utf8.jsonl"
    ) == message(data.jsonl(path))


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ('{"prompt": "x", "answer": NaN}', "NaN, which is not JSON"),
        ('{"prompt": "x", "answer": -Infinity}', "-Infinity, which is not JSON"),
        (
            '{"prompt": "\\ud800"}',
            "half of a surrogate pair (\\ud800 to \\udfff), which is no text",
        ),
        ("[" * 100_000, "maximum recursion depth exceeded while decoding a JSON array"),
    ],
)
def test_lines_that_only_a_lenient_parser_takes(folder, line, got):
    (finding,) = data.jsonl(lines_file(folder, line)).check()

    assert "E602" == finding.code
    assert finding.got.startswith(got)


def test_marks_blank_lines_and_line_ends_of_other_systems(folder):
    text = '\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "\\ud83d\\ude00"}\r\n'
    (folder / "a.jsonl").write_bytes(text.encode())
    source = data.jsonl("a.jsonl")

    assert [{"prompt": "a\u2028b"}, {"prompt": "😀"}] == source.rows()
    assert (2, []) == (source.size(), source.check())


def test_columns_are_those_of_the_first_row(folder):
    source = data.jsonl(lines_file(folder, {"prompt": "1"}, {"prompt": "2", "extra": 3}))

    assert [{"prompt": "1"}, {"prompt": "2"}] == source.rows()


def test_a_file_that_is_not_parquet(folder):
    path = lines_file(folder, GOOD[0])
    (finding,) = data.parquet(path).check()

    assert ("E601", "cannot read a.jsonl") == (finding.code, finding.what)
    assert "Parquet magic bytes not found in footer" in finding.got


def test_a_damaged_parquet_file(folder):
    path = parquet_file(folder, {"prompt": ["word" * 50 + str(i) for i in range(2000)]})
    raw = bytearray((folder / path).read_bytes())
    raw[40:4000] = bytes(3960)
    (folder / path).write_bytes(raw)
    source = data.parquet(path)

    assert ["E601"] == [finding.code for finding in source.check()]
    with pytest.raises(DataError, match="E601"):
        source.rows()


def test_a_parquet_column_that_is_missing(folder):
    path = parquet_file(folder, {"question": ["1"], "anser": ["2"]})

    assert (
        "error[E603]: a.parquet has no column 'answer'\n"
        "  got          columns question, anser\n"
        "  expected     a column 'answer'\n"
        "  did you mean 'anser'\n"
        '  fix          rename={"anser": "answer"}'
    ) == message(data.parquet(path, columns=["prompt", "answer"], prompt="question"))


def test_a_parquet_column_that_json_cannot_hold(folder):
    path = parquet_file(folder, {"prompt": ["1"], "image": [{"bytes": b"\x00"}], "n": [[1]]})

    assert (
        "error[E605]: a.parquet has a column 'image' that JSON cannot hold\n"
        "  got          struct<bytes: binary>\n"
        "  expected     text, numbers, booleans, or lists and structs of them\n"
        '  fix          columns=["prompt", "n"]'
    ) == message(data.parquet(path))
    assert [{"prompt": "1", "n": [1]}] == list(data.parquet(path, columns=["prompt", "n"]).rows())


def test_a_parquet_row_without_a_value(folder):
    source = data.parquet(parquet_file(folder, {"prompt": ["1", None], "answer": ["1", "2"]}))

    assert (
        "error[E603]: row 1 of a.parquet has no 'prompt'\n"
        "  got          'prompt' is null\n"
        "  expected     a value for 'prompt' in every row"
    ) == message(source)
    with pytest.raises(DataError, match=r"row 1 of a\.parquet"):
        list(source.rows())


def test_rows_that_lack_one_column_are_one_finding(folder):
    lines = "".join('{"question": "1+1=", "answer": "2"}\n' for _ in range(5))
    (folder / "a.jsonl").write_text(lines)
    assert (
        "error[E603]: line 1 of a.jsonl has no 'text' (and 4 more of this kind)\n"
        '  a.jsonl:1   {"question": "1+1=", "answer": "2"}\n'
        "  got          columns question, answer\n"
        "  expected     a value for 'text' in every row\n"
        '  fix          prompt="question"'
    ) == message(data.jsonl("a.jsonl", prompt="text"))

"""Pictures in data: what a column may hold, what is wrong with one, and pictures that are drawn."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from rlflow import data
from rlflow.data.pictures.columns import decoded_pictures, encoded_pictures
from rlflow.data.pictures.drawing import png
from rlflow.data.pictures.headers import picture_size
from rlflow.errors import DataError, UsageError

np = pytest.importorskip("numpy")


def drawn(width, height):
    return png([bytes([7]) * (3 * width)] * height)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "a.png").write_bytes(drawn(20, 12))
    (tmp_path / "seen" / "b.png").write_bytes(drawn(9, 30))
    return tmp_path


def jsonl(folder, *rows):
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return data.jsonl("rows.jsonl", images="pictures")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "WEBP lossless"])
def test_the_size_is_that_of_the_decoder(form):
    image = pytest.importorskip("PIL.Image")
    noise = np.random.default_rng(0).integers(0, 256, (33, 57, 3), dtype=np.uint8)
    file = io.BytesIO()
    name, _, lossless = form.partition(" ")
    image.fromarray(noise).save(file, name, **({"lossless": True} if lossless else {}))

    assert (57, 33) == picture_size(file.getvalue())


def test_paths_are_beside_the_file(folder):
    source = jsonl(
        folder,
        {"prompt": "which?", "answer": "a", "pictures": "seen/a.png"},
        {"prompt": "which?", "answer": "b", "pictures": ["seen/a.png", "seen/b.png"]},
        {"prompt": "none?", "answer": "c", "pictures": None},
    )

    assert [] == source.check()
    assert source.pictured
    assert ("prompt", "answer", "images") == source.columns
    assert [1, 2, 0] == [len(row["images"]) for row in source.rows()]
    assert [(20, 12), (9, 30)] == source.picture_sizes(source.rows()[1])


def test_a_frame_each_is_a_list_of_pictures_in_parquet(folder):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    frames = [{"bytes": drawn(8, 8), "path": None}, {"bytes": None, "path": "seen/b.png"}]
    table = pa.table({"prompt": ["go"], "frames": pa.array([frames], pa.list_(kind))})
    parquet.write_table(table, folder / "rows.parquet")
    source = data.parquet("rows.parquet", images="frames")

    assert [] == source.check()
    assert [(8, 8), (9, 30)] == source.picture_sizes(source.rows()[0])


@pytest.mark.parametrize(
    ("pictures", "prompt", "code", "said"),
    [
        ("seen/c.png", "x", "E611", "no file"),
        ("rows.jsonl", "x", "E611", "is no picture"),
        (7, "x", "E611", "int 7"),
        (
            "seen/a.png",
            [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}],
            "E612",
            "1 pictures, and 2 places",
        ),
    ],
)
def test_what_is_wrong_with_a_picture_is_one_finding(folder, pictures, prompt, code, said):
    source = jsonl(folder, {"prompt": prompt, "pictures": pictures})
    (finding,) = source.check()

    assert code == finding.code
    assert said in finding.got
    assert "line 1 of rows.jsonl" in finding.what


def test_a_run_says_which_picture_is_gone(folder):
    source = jsonl(folder, {"prompt": "x", "pictures": "seen/a.png"})
    row = source.rows()[0]
    (folder / "seen" / "a.png").unlink()

    with pytest.raises(DataError, match="no file"):
        encoded_pictures(row["images"])


def test_a_field_holds_the_files_bytes():
    files = [drawn(3, 4), b"", drawn(5, 6)]

    assert [files[0], files[2]] == decoded_pictures(encoded_pictures([files[0], files[2]]))
    assert [] == decoded_pictures(encoded_pictures([]))


def test_rows_of_a_mix_without_pictures_have_none(folder):
    seen = jsonl(folder, {"prompt": "x", "pictures": "seen/a.png"})
    (folder / "text.jsonl").write_text('{"prompt": "y"}\n')
    mixed = data.mix({"seen": seen, "text": data.jsonl("text.jsonl")})

    assert [] == mixed.check()
    assert [1, 0] == [len(row["images"]) for row in mixed.rows()]


@pytest.mark.parametrize("question", ["colour", "shape", "count"])
def test_drawn_pictures_follow_from_their_number(question):
    rows = data.shapes(question, size=64).rows()
    test = data.shapes(question, size=64, split="test").rows()

    assert rows[:64] == data.shapes(question, size=64).rows()[:64]
    assert not {r["images"][0] for r in rows[:64]} & {r["images"][0] for r in test[:64]}
    assert len({row["answer"] for row in rows[:64]}) > 2
    with pytest.raises(UsageError, match="shapes has no 'size'"):
        data.shapes("size")


def test_a_check_loads_neither_torch_nor_a_library_of_images(folder):
    jsonl(folder, {"prompt": "x", "pictures": "seen/a.png"})
    code = (
        "import sys, rlflow as rf\n"
        "assert not rf.data.jsonl('rows.jsonl', images='pictures').check()\n"
        "print([name for name in ('torch', 'PIL') if name in sys.modules])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder
    )
    assert "[]" == said.stdout.strip()

"""The shipped tiny model: its tokenizer gives text back exactly, its files can be rebuilt."""

from __future__ import annotations

import json
import runpy
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "pipelines" / "assets" / "build_arith_tiny.py"
ASSET = ROOT / "pipelines" / "assets" / "arith-tiny"
ALPHABET = string.digits + "+-*/=().,:? " + string.ascii_lowercase


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ASSET)


def built(out, *arguments):
    command = [sys.executable, str(SCRIPT), "--out", str(out), *arguments]
    subprocess.run(command, check=True, capture_output=True)
    return {path.name: path.read_bytes() for path in out.iterdir()}


def parameters(folder):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return type(model).__name__, sum(p.numel() for p in model.parameters())


def test_the_shipped_files_are_those_of_the_script(tmp_path):
    files = built(tmp_path)

    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} == set(files)
    assert files == {name: (ASSET / name).read_bytes() for name in files}


@given(text=st.text(ALPHABET, max_size=60))
def test_text_comes_back_exactly(tokenizer, text):
    ids = tokenizer(text)["input_ids"]

    assert len(text) == len(ids)
    assert text == tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_special_tokens(tokenizer):
    assert tokenizer.is_fast
    assert (0, 1, 2, None) == (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
        tokenizer.bos_token_id,
    )
    assert 3 + len(ALPHABET) == len(tokenizer)
    assert [4, 13, 4, 17, 5, 1] == tokenizer("1+1=2<eos>")["input_ids"]
    assert "1+1=2" == tokenizer.decode([4, 13, 4, 17, 5, 1], skip_special_tokens=True)


def test_the_tokenizer_file_alone_says_the_same(tokenizer):
    from tokenizers import Tokenizer

    alone = Tokenizer.from_file(str(ASSET / "tokenizer.json"))

    assert tokenizer(ALPHABET)["input_ids"] == alone.encode(ALPHABET).ids
    assert ALPHABET == alone.decode(alone.encode(ALPHABET).ids)


def test_the_chat_template(tokenizer):
    question = [{"role": "user", "content": "1+1=?"}]
    answered = [*question, {"role": "assistant", "content": "2"}]
    asked = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)

    assert "user: 1+1=? assistant: " == asked
    assert f"{asked}2<eos>" == tokenizer.apply_chat_template(answered, tokenize=False)


def test_the_model():
    assert ("Qwen2ForCausalLM", 400_896) == parameters(ASSET)


def test_the_larger_model_of_the_benchmarks(tmp_path):
    files = built(tmp_path, "--layers", "4", "--hidden", "256", "--intermediate", "1024")

    assert 1024 == json.loads(files["config.json"])["intermediate_size"]
    assert ("Qwen2ForCausalLM", 3_949_568) == parameters(tmp_path)


def test_a_size_that_cannot_be(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "--hidden", "100", "--out", str(tmp_path / "x")])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(SCRIPT), run_name="__main__")

    assert "--hidden a multiple of 8" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()

"""Models that are not there, or not whole, are told by check and plan, in seconds."""

from __future__ import annotations

import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rlflow.modelfiles import hub
from tests.conftest import TINY

PIPELINE = """\
import rlflow as rf
from rlflow import ops


def exact(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline()
def grpo(cfg: rf.Config) -> None:
    actor = rf.Model("actor", "MODEL", optimizer=rf.AdamW(lr=1e-4))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=8)
    advantages = ops.advantage("grpo", samples, ops.reward(exact, samples))
    ops.update(actor, samples, advantages, loss=rf.PolicyLoss())
"""


class Hub(BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path.partition("?")[0] == "/api/models/some/known"
        body = b'{"id": "some/known", "siblings": []}' if known else b"{}"
        self.send_response(200 if known else 404)
        if not known:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub" / "models--some--known-7b").mkdir(parents=True)
    hub._asked.cache_clear()

    def write(model):
        (tmp_path / "grpo.py").write_text(PIPELINE.replace("MODEL", str(model)))

    return write


@pytest.fixture
def online(monkeypatch):
    """A hub of this machine that has some/known alone."""
    import huggingface_hub.constants

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_misspelt_hub_name_is_told(rlflow, home, online, command):
    home("some/known-7bb")

    found = rlflow(command, "grpo.py")

    assert 2 == found.code
    assert "error[E528]" in found.err
    assert "did you mean 'some/known-7b'" in found.err
    assert "grpo.py:11" in found.err
    home("some/known")
    assert 0 == rlflow(command, "grpo.py").code


@pytest.mark.parametrize("reachable", [False, True])
def test_a_hub_that_is_not_there_ends_a_run_in_seconds(rlflow, home, monkeypatch, reachable):
    monkeypatch.setattr(hub, "SECONDS", 0.2)
    monkeypatch.setattr(hub, "_answer", lambda *_: threading.Event().wait(3))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0" if reachable else "1")
    home("some/other")
    began = time.monotonic()

    assert 0 == rlflow("check", "grpo.py").code
    found = rlflow("run", "grpo.py", "--iterations", 1)

    assert 2 == found.code
    assert ("the hub does not answer" if reachable else "HF_HUB_OFFLINE is set") in found.err
    assert "hf download some/other --local-dir models/other" in found.err
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_model_without_a_tokenizer_is_told(rlflow, home, tmp_path, command):
    shutil.copytree(TINY, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*"))
    home("./bare")

    found = rlflow(command, "grpo.py")

    assert 2 == found.code
    assert "error[E529]: actor.rollout needs a tokenizer, and './bare' has none" in found.err
    assert "grpo.py:13" in found.err


def test_a_misspelt_directory_is_told(rlflow, home, tmp_path):
    shutil.copytree(TINY, tmp_path / "models" / "tiny")
    home("models/tinny")

    found = rlflow("check", "grpo.py")

    assert 2 == found.code
    assert "did you mean 'models/tiny'" in found.err

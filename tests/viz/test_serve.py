"""The page of a run that is served: behind a token, on this machine alone, read-only, live."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from rlflow.errors import RunDirError, UsageError
from rlflow.report.interactive.serve import PageServer, WatchedRun, serving_page
from tests.conftest import ROOT


@pytest.fixture
def served(run_dir: Path) -> Iterator[PageServer]:
    with serving_page(WatchedRun(run_dir)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(server: PageServer, path: str, method: str = "GET", **headers: str):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def with_token(server: PageServer, path: str) -> str:
    return f"{path}{'&' if '?' in path else '?'}token={server.token}"


def test_the_address_is_of_this_machine_and_opens_the_page(served: PageServer):
    address = urlsplit(served.address)
    assert "127.0.0.1" == address.hostname == served.server_address[0]
    assert [served.token] == parse_qs(address.query)["token"]
    assert len(served.token) >= 32
    status, body = asked(served, f"/?{address.query}")
    assert (200, True) == (status, 'id="data-live"' in body)
    assert "connect-src 'self'" in body


@pytest.mark.rows(2)
@pytest.mark.parametrize("path", ["/", "/?token=", "/?token=wrong", "/new?token=wrong", "/x"])
def test_without_the_token_nothing_is_told(served: PageServer, path: str):
    status, body = asked(served, path)
    assert 403 == status
    assert "ppo" not in body


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example:1"])
def test_another_sites_name_does_not_lead_here(served: PageServer, host: str):
    assert 403 == asked(served, with_token(served, "/"), Host=host)[0]


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    "path",
    ["/run.json", "/../run.json", "/%2e%2e/run.json", "//etc/passwd", "/new/../../../etc/passwd",
     "/..%2f..%2fetc/passwd", "/new/", "/spans/main.jsonl", "/\\..\\run.json"],
)  # fmt: skip
def test_no_path_leads_to_a_file(served: PageServer, path: str):
    assert 404 == asked(served, with_token(served, path))[0]


@pytest.mark.rows(2)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_there_is_nothing_to_write(served: PageServer, method: str):
    assert 501 == asked(served, with_token(served, "/"), method)[0]


def test_what_is_new_is_told_once(served: PageServer, run_dir: Path):
    status, body = asked(served, with_token(served, "/new"))
    first = json.loads(body)
    assert 200 == status
    assert {"head", "plan", "metrics"} <= set(first["parts"])
    again = with_token(served, f"/new?seen={first['seen']}")
    assert (204, "") == asked(served, again)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "metrics": {"reward/mean": 0.875}}\n')
    status, body = asked(served, again)
    assert 200 == status
    assert "0.875" in json.loads(body)["parts"]["metrics"]


def test_a_file_that_is_damaged_for_now_is_told_and_ends_nothing(served, run_dir: Path):
    whole = (run_dir / "plan.json").read_text()
    (run_dir / "plan.json").write_text("{")
    status, body = asked(served, with_token(served, "/"))
    assert (503, True) == (status, "plan.json is damaged" in body)
    (run_dir / "plan.json").write_text(whole)
    assert 200 == asked(served, with_token(served, "/"))[0]


def test_looking_writes_nothing(served: PageServer, run_dir: Path):
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    for path in ("/", "/new"):
        assert 200 == asked(served, with_token(served, path))[0]
    assert before == {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}


def test_a_taken_port_and_what_is_no_run_are_errors(served: PageServer, tmp_path: Path):
    with pytest.raises(UsageError, match="E667"):
        serving_page(served.watched, served.server_port)
    with pytest.raises(RunDirError, match="is not a run directory"):
        WatchedRun(tmp_path).answer("")


def test_ctrl_c_ends_it_quietly(run_dir: Path):
    command = [sys.executable, "-m", "rlflow.cli.main", "watch", str(run_dir)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert 0 == process.returncode, err
    assert "Traceback" not in err

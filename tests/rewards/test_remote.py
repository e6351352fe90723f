"""A judge behind an address: what is sent, what is read, and every way it can go wrong."""

from __future__ import annotations

import inspect
import json
import pickle
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import rlflow as rf
from rlflow.errors import UsageError
from rlflow.rewards.bounds import Bounds
from rlflow.rewards.judging import Failure, judge

SAMPLES = [{"prompt": "1+1=", "response": "2"}]


class Server:
    """Answers as a test says; notes requests."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []
        self.headers = []
        self.stuck = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                size = int(self.headers["Content-Length"])
                server.asked.append((self.path, json.loads(self.rfile.read(size))))
                server.headers.append(dict(self.headers))
                answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
                answer(self) if callable(answer) else plain(*answer)(self)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))

    @property
    def url(self):
        return f"http://127.0.0.1:{self.http.server_port}/score?v=1"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.stuck.set()
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def plain(status, body):
    def answer(request):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    return answer


def chunked(request):
    request.send_response(200)
    request.send_header("Transfer-Encoding", "chunked")
    request.send_header("Connection", "close")
    request.end_headers()
    for part in (b'{"sc', b'ore": 0.', b"25}"):
        request.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
    request.wfile.write(b"0\r\n\r\n")
    request.close_connection = True


def cut_short(request):
    request.send_response(200)
    request.send_header("Content-Length", "100")
    request.end_headers()
    request.wfile.write(b'{"score": 1')
    request.close_connection = True


def hang_up(request):
    request.close_connection = True


def ask(server, samples=SAMPLES, bounds=None, **options):
    judge_of = rf.rewards.HTTPJudge(server.url, **options)
    return judge(judge_of, samples, bounds=bounds or Bounds(timeout=10)).values


def test_a_sample_is_one_request_and_its_answer_the_reward():
    with Server((200, {"score": 0.75})) as server:
        assert [0.75] == ask(server)
    assert [("/score?v=1", SAMPLES[0])] == server.asked
    assert "application/json" == server.headers[0]["Content-Type"]


def test_names_extras_headers_and_the_place_of_the_score():
    answer = (200, {"choices": [{"verdict": 0.0}, {"verdict": 1}]})
    with Server(answer) as server:
        options = {
            "fields": {"response": "text"},
            "score": "choices.1.verdict",
            "extra": {"model": "judge"},
            "headers": {"Authorization": "Bearer x"},
        }
        assert [1.0] == ask(server, [{"response": "é"}], **options)
    assert [("/score?v=1", {"model": "judge", "text": "é"})] == server.asked
    assert "Bearer x" == server.headers[0]["Authorization"]


def test_an_answer_in_chunks():
    with Server(chunked) as server:
        assert [0.25] == ask(server)


@pytest.mark.parametrize(
    ("answer", "cause", "problem"),
    [
        ((500, "broken"), "raised", "status 500: broken"),
        ((429, "slow down"), "raised", "status 429: slow down"),
        ((404, "nobody"), "raised", "Unscorable: status 404: nobody"),
        ((302, "elsewhere"), "raised", "Unscorable: status 302: elsewhere"),
        ((200, ""), "raised", "the answer is no JSON"),
        ((200, "<html>"), "raised", "the answer is no JSON"),
        ((200, {"reward": 1}), "raised", "the answer has no 'score': {\"reward\": 1}"),
        ((200, [1.0]), "raised", "the answer has no 'score'"),
        ((200, {"score": None}), "not a number", "returned None"),
        ((200, {"score": "1"}), "not a number", "returned '1'"),
        ((200, '{"score": NaN}'), "not a number", "returned nan"),
        ((200, '{"score": 1e400}'), "not a number", "returned inf"),
        (cut_short, "raised", "the answer is cut short"),
        (hang_up, "raised", "the answer is cut short"),
        ((200, "x" * (2**20 + 1)), "raised", "longer than 1 MiB"),
    ],
)
def test_an_answer_that_cannot_be_used_is_a_failure(answer, cause, problem):
    with Server(answer) as server:
        (failure,) = ask(server)
    assert isinstance(failure, Failure)
    assert (cause, True) == (failure.cause, problem in failure.problem), failure.problem


@pytest.mark.parametrize(
    ("status", "asked"), [(408, 3), (425, 3), (429, 3), (500, 3), (503, 3), (400, 1), (401, 1)]
)
def test_what_may_be_better_next_time_is_asked_again(status, asked):
    with Server((status, "no"), (status, "no"), (200, {"score": 1.0})) as server:
        bounds = Bounds(timeout=10, retries=2, backoff=0)
        (value,) = ask(server, bounds=bounds)
    assert asked == len(server.asked)
    assert (value == 1.0) == (asked == 3)


def test_a_judge_that_drips_is_cut_off_at_the_time_limit():
    with Server((200, {"score": 1.0})) as server:

        def drip(request):
            request.send_response(200)
            request.end_headers()
            while not server.stuck.wait(0.02):
                request.wfile.write(b" ")
                request.wfile.flush()

        server.answers = [drip]
        (failure,) = ask(server, bounds=Bounds(timeout=0.3))
    assert "timeout" == failure.cause


def test_nobody_at_the_address():
    with Server((200, {})) as server:
        pass
    (failure,) = ask(server)
    assert "raised" == failure.cause
    assert "ConnectionRefusedError" in failure.problem


@pytest.mark.parametrize(
    "url", ["", "localhost:80", "ftp://host/x", "http://", "http://me:secret@host/x"]
)
def test_an_address_that_is_none(url):
    with pytest.raises(UsageError) as caught:
        rf.rewards.HTTPJudge(url)
    assert "E287" == caught.value.findings[0].code
    assert "secret" not in str(caught.value)


def test_secrets_of_the_address_and_the_headers_are_not_in_its_name():
    judge_of = rf.rewards.HTTPJudge("http://host/x?key=secret", headers={"A": "secret"})
    assert "HTTPJudge(http://host/x)" == judge_of.__qualname__


def test_a_judge_travels_to_other_processes():
    with Server((200, {"score": 0.5})) as server:
        sent = pickle.loads(pickle.dumps(rf.rewards.HTTPJudge(server.url)))
        assert [0.5] == judge(sent, SAMPLES).values
    assert ["prompt", "response"] == list(inspect.signature(sent).parameters)

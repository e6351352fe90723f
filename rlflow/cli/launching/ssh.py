"""A launched run on hosts by ssh: the same connections start it, carry its output, and end it.

Every host runs a program that it reads from its connection, and ends when that does: nothing is
left there, however this process ends. Values of variables that are passed by name go over the
connection alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from rlflow.cli.launching.job import FIND_ADDRESS, LaunchJob
from rlflow.errors import Finding, RunError

PORT = 6379
END_SECONDS = 60.0
SHIP_SECONDS = 600.0
TOKEN = "RAY_AUTH_TOKEN"  # noqa: S105  the name of a variable


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteProgram:
    """What a host is told to do, in the words of bash."""

    host: str
    what: str
    text: str


def ssh_text(job: LaunchJob, hosts: Sequence[str], words: Sequence[str]) -> str:
    """All that would be done, as it is printed: programs by host, in their order."""
    lines = ["#!/bin/bash", *job.described()]
    passed = [*job.variables.passed, *([TOKEN] if len(hosts) > 1 else [])]
    if passed:
        lines.append(f"# Over the connection alone: {', '.join(passed)}.")
    if len(hosts) > 1:
        found = f"{FIND_ADDRESS.removeprefix('address=')}"
        lines.append(f"# $address stands for what {hosts[0]} answers to: echo {found}")
    for program in programs(job, hosts, "$address"):
        typed = shlex.join([*words, program.host, "bash", "-s"])
        lines += ["", f"# {program.what}", f"{typed} <<'END'", program.text.rstrip(), "END"]
    return "\n".join(lines) + "\n"


def programs(job: LaunchJob, hosts: Sequence[str], address: str) -> list[RemoteProgram]:
    """What the hosts are told: the nodes of Ray, the head first; then, on the first, the run."""
    joined = f"{address}:{PORT}"
    starts = [
        job.ray_start(
            f"--head --node-ip-address={address} --port={PORT} --include-dashboard=false"
        ),
        *[job.ray_start(f"--address={joined}")] * (len(hosts) - 1),
    ]
    nodes = [
        RemoteProgram(
            host=host,
            what=f"Ray on {host}" + (", its head" if not number else ""),
            text=_node(job, start, f"{job.beside}/ray-{number}.log", joined if number else ""),
        )
        for number, (host, start) in enumerate(zip(hosts, starts, strict=True))
    ]
    several = len(hosts) > 1
    run = RemoteProgram(
        host=hosts[0],
        what=f"the run, on {hosts[0]}",
        text=_held(
            [
                *job.environment(),
                *(["export RAY_AUTH_MODE=token"] if several else []),
                *job.chosen(),
                f"{job.command(joined if several else '')} < /dev/null &",
                *_until_it_ends(),
            ]
        ),
    )
    return [*(nodes if several else []), run]


def run_by_ssh(
    job: LaunchJob, hosts: Sequence[str], words: Sequence[str], archive: bytes | None
) -> int:
    """Ship the code, start Ray on the hosts and the run on the first; returns its exit code.

    Ctrl-C or SIGTERM stops the run after what has begun, a second one at once. Raises RunError
    E385 where a host cannot be reached or takes no files.
    """
    for host in hosts:
        _prepare(job, host, words, archive)
    address = _asked(words, hosts[0], f'{FIND_ADDRESS}; echo "$address"') if hosts[1:] else ""
    given = {name: os.environ[name] for name in job.variables.passed}
    given |= {TOKEN: secrets.token_hex(32)} if hosts[1:] else {}
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in given.items())
    *nodes, run = programs(job, hosts, address)
    with contextlib.ExitStack() as stack:
        for node in nodes:
            stack.enter_context(_connected(words, node, exports))
        started = stack.enter_context(_connected(words, run, exports))
        with _stopping(started):
            return started.wait()


def _node(job: LaunchJob, start: str, log: str, head: str) -> str:
    """The program of a node of Ray, which waits for the `head` if it is a worker."""
    host, _, port = head.partition(":")
    wait = f"until (exec 3<> /dev/tcp/{host}/{port}) 2> /dev/null; do sleep 1; done"
    return _held(
        [
            *job.environment(),
            "export RAY_AUTH_MODE=token",
            *([wait] if head else []),
            f"{start} < /dev/null > {shlex.quote(log)} 2>&1 &",
            *_until_it_ends(),
        ]
    )


def _held(lines: Sequence[str]) -> str:
    """A program that is read whole before any of it runs; what follows it is its input."""
    return "\n".join(["{", "set -euo pipefail", *lines, "}"]) + "\n"


def _until_it_ends() -> list[str]:
    """Wait for what was started; a line that comes stops it, and a second one at once.

    The end of the connection stops it where no line has.
    """
    return [
        "started=$!",
        'stop() { kill -TERM "$started" 2> /dev/null || true; }',
        '{ told=; while read -r _; do told=1; stop; done; [ -n "$told" ] || stop; } <&0 &',
        "watching=$!",
        "code=0",
        'wait "$started" || code=$?',
        'kill "$watching" 2> /dev/null || true',
        'exit "$code"',
    ]


def _prepare(job: LaunchJob, host: str, words: Sequence[str], archive: bytes | None) -> None:
    """Make the folders of a launch on a host, and unpack the code there."""
    folder = shlex.quote(job.unpacked or job.beside)
    beside = shlex.quote(job.beside)
    unpack = f"tar -xzf - -C {folder}" if archive is not None else "true"
    program = f"mkdir -p {beside} {folder} && {unpack}"
    _asked(words, host, program, archive or b"")


def _asked(words: Sequence[str], host: str, program: str, given: bytes = b"") -> str:
    """What a host prints for a program. Raises RunError E385 where it fails."""
    try:
        done = subprocess.run(  # noqa: S603 - the words are the user's own
            [*words, host, f"bash -c {shlex.quote(program)}"],
            input=given,
            capture_output=True,
            timeout=SHIP_SECONDS,
            check=False,
        )
        problem = done.stderr.decode(errors="replace").strip() if done.returncode else ""
        code, out = done.returncode, done.stdout.decode(errors="replace").strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        problem, code, out = str(error), 1, ""
    if code:
        raise RunError(
            Finding(
                code="E385",
                what=f"{host} does not do what it is told by ssh",
                got=problem or f"exit code {code}",
                expected="a host that ssh enters without a question",
                fix=f"{shlex.join([*words, host])} true",
            ),
            summary="Nothing was started.",
        )
    return out


@contextlib.contextmanager
def _connected(
    words: Sequence[str], program: RemoteProgram, exports: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A program on a host, in a session of its own: a Ctrl-C here is not one there."""
    started = subprocess.Popen(  # noqa: S603 - the words are the user's own
        [*words, program.host, "bash", "-s"],
        stdin=subprocess.PIPE,
        stdout=None if program.what.startswith("the run") else sys.stderr,
        start_new_session=True,
    )
    try:
        assert started.stdin is not None
        started.stdin.write(f"{exports}{program.text}".encode())
        started.stdin.flush()
        yield started
    finally:
        _close(started)
        try:
            started.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def _close(started: subprocess.Popen[bytes]) -> None:
    """End what a host reads; the program there stops what it has started."""
    if started.stdin is not None:
        with contextlib.suppress(OSError):
            started.stdin.close()


def _tell(started: subprocess.Popen[bytes]) -> None:
    """Send the line that stops what a host runs; nothing where the connection is gone."""
    if started.stdin is not None:
        with contextlib.suppress(OSError, ValueError):
            started.stdin.write(b"stop\n")
            started.stdin.flush()


@contextlib.contextmanager
def _stopping(started: subprocess.Popen[bytes]) -> Iterator[None]:
    """Within it, Ctrl-C and SIGTERM stop the run on its host, as they would one that runs here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        _tell(started)

    previous = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

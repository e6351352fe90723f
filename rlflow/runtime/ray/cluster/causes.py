"""Why a worker is gone, in one plain sentence made of what Ray and the worker's log say.

Knows Ray's exceptions and the words of its messages; knows no plan.
"""

from __future__ import annotations

import re
from pathlib import Path

import ray._private.worker
from ray import exceptions

from rlflow.errors import RlflowError

LOST = (
    exceptions.RayActorError,
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.OutOfMemoryError,
    exceptions.LocalRayletDiedError,
    exceptions.ObjectLostError,
)
# What Ray writes, and what it means. The first that is found counts.
WORDS = (
    (r"killed by `ray\.kill`", "was stopped by this run"),
    (
        r"running low on memory|node ran out of memory|OUT_OF_MEMORY",
        "was killed by Ray: its node ran out of memory",
    ),
    (r"owner has died|OWNER_DIED", "was stopped because the process that started it died"),
    (
        r"node has died|node was terminated|health check|NODE_DIED|missed too many heartbeats",
        "died with its node",
    ),
    (r"SIGTERM", "was stopped by SIGTERM"),
    (r"exit code (\d+)", "ended with exit code {}"),
    (r"user request|exit_actor|INTENDED", "ended by itself"),
    (r"placement group .* removed", "was stopped because its devices were given back"),
)
UNSEEN = "was killed, or ended without a word (kill -9, no memory left on the machine, os._exit)"
CRASH = re.compile(r"\*\*\* (SIG[A-Z]+) received")
LOG_BYTES = 65536


def unwrapped(error: BaseException) -> BaseException:
    """The exception that a worker raised, for what Ray makes of it; any other as it is.

    Ray's, which has the worker's traceback as text, becomes its cause.
    """
    inner = getattr(error, "cause", None)
    if not isinstance(error, exceptions.RayTaskError) or not isinstance(inner, BaseException):
        return error
    found = unwrapped(inner)
    if found.__cause__ is None and found is not error:
        found.__cause__ = error
    return found


def cause_of(error: BaseException) -> str:
    """One sentence: which process, on which node, and how it ended; or what was raised."""
    error = unwrapped(error)
    if isinstance(error, RlflowError):
        return error.findings[0].what if error.findings else str(error)
    if not isinstance(error, LOST):
        return f"{type(error).__name__}: {_last_line(_innermost(error))}"
    text = str(error)
    if getattr(error, "actor_init_failed", False):
        return f"it could not be created: {_last_line(text)}"
    if isinstance(error, exceptions.ActorUnavailableError):
        # Asking the head node where it is would end this process where another head has come.
        return "it cannot be reached: it died, or its node or the network did"
    pid, node = _found(r"\bpid: (\d+)", text), _found(r"\bip: (\S+)", text)
    return f"{_process(pid, node)} {_end(text, pid)}"


def _process(pid: str, node: str) -> str:
    return "its process" + (f" {pid}" if pid else "") + (f" on node {node}" if node else "")


def _end(text: str, pid: str) -> str:
    """How a process ended."""
    # A list of common causes follows where Ray knows none, and names all of them.
    said = text.partition("Some common causes include")[0].partition("There are some potential")[0]
    for pattern, meaning in WORDS:
        match = re.search(pattern, said)
        if match:
            return meaning.format(*match.groups())
    crash = _crash(pid)
    return f"crashed ({crash})" if crash else UNSEEN


def _crash(pid: str) -> str:
    """The signal that a worker of this node logged as it crashed; nothing where there is none."""
    node = ray._private.worker._global_node
    if node is None or not pid:
        return ""
    for log in Path(node.get_logs_dir_path()).glob(f"worker-*-{pid}.err"):
        with log.open("rb") as file:
            match = CRASH.search(file.read(LOG_BYTES).decode(errors="replace"))
        if match:
            return match[1]
    return ""


def _innermost(error: BaseException) -> str:
    """The message of the error that began a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""

"""Processes in one gloo world that run a test's functions, one after the other.

They are forked from a server that has imported torch once, and live until the session ends or
one of them fails: after a failure, or when the time is up, all are killed and new ones made.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

IMPORTED = [
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.mistral.modeling_mistral",
    "torch.nested._internal.ops",
    "rlflow.engines.hf.rollout",
    "rlflow.engines.hf.sharded.build",
    "rlflow.engines.hf.sharded.rollout",
    "rlflow.engines.hf.sharded.train",
    "rlflow.engines.hf.stages.train",
    "rlflow.runtime.record.checkpoint",
]
# Once one rank has failed the others may wait for it forever.
GRACE = 2.0


class World:
    """`size` processes; `run` calls a function in each and returns what they return."""

    def __init__(self, size):
        self.size = size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self.folder = tempfile.TemporaryDirectory()
        meeting = Path(self.folder.name) / "store"
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, size, str(meeting), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    @property
    def alive(self):
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def run(self, function, *args, timeout=240.0):
        """Call `function(rank, *args)` everywhere; AssertionError with tracebacks of failures.

        Where many share a machine the first call waits for minutes: it comes after imports.
        """
        for pipe in self.pipes:
            pipe.send((function, args))
        answers, failed = {}, {}
        end = time.monotonic() + timeout
        while len(answers) + len(failed) < self.size and time.monotonic() < end:
            open_ranks = set(range(self.size)) - answers.keys() - failed.keys()
            for rank in open_ranks:
                self.collect(rank, answers, failed)
            if failed:
                end = min(end, time.monotonic() + GRACE)
        silent = sorted(set(range(self.size)) - answers.keys() - failed.keys())
        if failed or silent:
            self.close()
            texts = [f"rank {rank}: {text}" for rank, text in sorted(failed.items())]
            raise AssertionError("\n".join([*texts, f"ranks without an answer: {silent}"]))
        return [answers[rank] for rank in range(self.size)]

    def collect(self, rank, answers, failed):
        try:
            if self.pipes[rank].poll(0.01):
                right, value = self.pipes[rank].recv()
                (answers if right else failed)[rank] = value
        except (EOFError, OSError):
            failed[rank] = "the process has ended"

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []
        self.folder.cleanup()


def serve(rank, size, meeting, pipe):
    """A rank's life: join the world, then call what is sent."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for kind in (DeprecationWarning, PendingDeprecationWarning):
        warnings.simplefilter("ignore", kind)
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(rank, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)

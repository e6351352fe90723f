"""SGLang through rlflow beside bare SGLang, in turns: a rollout's time, and a weight update's.

Both sides are engine processes with the same arguments, environment and weights. One works at a
time: the other's processes are stopped meanwhile. Rollouts are greedy, of 256 prompts that no
engine has seen, with log-probs, every response of the same length; both sides have to make the
same tokens. An update brings all weights from this side's memory into the engine.

RLFLOW_SGLANG_PYTHON=.venv-sglang/bin/python python benchmarks/vs_sglang.py
RLFLOW_SGLANG_PYTHON=sglang-env/bin/python python benchmarks/vs_sglang.py --device cuda:0

On a GPU the weights are those of a trainer there, in bfloat16, and reach rlflow's engine in buckets
that it opens by handles; the bare engine's lie in its own process on the same GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from common import (
    CACHE,
    HERE,
    RESULTS,
    ROOT,
    machine,
    markdown_report,
    markdown_table,
    say,
    text_table,
    write_results,
)

VOCABULARY, CONTEXT = 2048, 256
TARGET = 1.03
HEADER = ("case", "rlflow ms", "bare ms", "ratio", "of pairs", "target", "met")
NOTES = (
    "Medians over the turns; the ratio is the median over the pairs, `of pairs` the lowest and the "
    "highest. The sides take turns, A B B A, and the processes of the one that waits are stopped.",
    "The same arguments, environment and random weights; one thread each. A rollout is greedy and "
    "of full length, of prompts that are not cached; the tokens of both sides are equal.",
    "Bare is `Engine.async_generate` of all prompts in one call, with log-probs, timed in the "
    "engine's own process; rlflow is `SGLangRollout.generate`, timed in the worker, and gives "
    "tensors.",
    "The bare update is one `update_weights_from_tensor` with a flattened bucket, begin and end of "
    "its session included, from tensors in the engine's own process; rlflow's brings tensors of "
    "the worker: a copy to the memory that both share, a wait until nothing runs, the same bucket, "
    "and a check of the version.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Seconds of the turns of both sides; `target` is the largest ratio that passes, if any."""

    name: str
    ours: tuple[float, ...]
    bare: tuple[float, ...]
    target: float | None

    @property
    def ratios(self) -> list[float]:
        """Ours over bare, one for each pair."""
        return [ours / bare for ours, bare in zip(self.ours, self.bare, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(self.ratios)

    def row(self) -> tuple[str, ...]:
        """A line of the table."""
        met = "" if self.target is None else "yes" if self.ratio <= self.target else "NO"
        return (
            self.name,
            f"{statistics.median(self.ours) * 1e3:.1f}",
            f"{statistics.median(self.bare) * 1e3:.1f}",
            f"{self.ratio:.3f}",
            f"{min(self.ratios):.2f}..{max(self.ratios):.2f}",
            "none" if self.target is None else f"<= {self.target:.2f}",
            met,
        )

    def as_json(self) -> dict[str, Any]:
        """Everything measured, and the ratio."""
        return {
            "name": self.name,
            "rlflow_seconds": self.ours,
            "bare_seconds": self.bare,
            "ratio": self.ratio,
            "target": self.target,
        }


class Bare:
    """The script that drives a bare engine, in a session of its own."""

    def __init__(
        self, python: str, environment: Mapping[str, str], given: Mapping[str, Any]
    ) -> None:
        self._process = subprocess.Popen(
            [python, str(HERE / "vs_sglang_side.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(CACHE / "logs" / "vs_sglang_side.log").open("wb"),
            env=dict(environment),
            text=True,
            start_new_session=True,
        )
        self.group = self._process.pid
        self.facts = self.ask({"arguments": given})

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request. Raises SystemExit where the script has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the bare side has ended: {CACHE / 'logs' / 'vs_sglang_side.log'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the script and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        self._process.wait()


class Ours:
    """An engine that rlflow has started, with random weights of its own."""

    def __init__(self, path: str, python: str, tokens: int, device: str = "cpu") -> None:
        import torch

        from rlflow.engines.process.client.load import load_sglang
        from rlflow.graph.user.engines import SGLang

        torch.set_num_threads(1)
        gpu = torch.device(device).type == "cuda"
        way: dict[str, Any] = {"updates": "device"} if gpu else {}
        self.model, self.rollout = load_sglang(
            path,
            name="bench",
            options=SGLang(python=python, max_total_tokens=tokens, **way),
            dtype=torch.bfloat16 if gpu else torch.float32,
            device=device,
            init="random",
        )
        held = self.model.staging.tensors.items()
        self.weights = {k: v.to(device, copy=True) for k, v in held}
        self.stream = self._stream(device) if gpu else None
        self.launch = self.model.replica.launch
        assert self.model.replica._process is not None
        self.group = self.model.replica._process.pid

    def generate(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """The responses of all prompts: seconds, tokens and their checksum."""
        import torch

        from rlflow.batch import ragged_rows
        from rlflow.contract.values import SampleKey, Sampling

        sampling = Sampling(max_new_tokens=new_tokens, temperature=0.0)
        rows, ids = ragged_rows(prompts, torch.int64), torch.arange(len(prompts))
        key = SampleKey(seed=0, iteration=0, stream="bench")
        began = time.perf_counter()
        made = self.rollout.generate(rows, sampling, key, ids)
        seconds = time.perf_counter() - began
        found = [row.tolist() for row in made.response_tokens.unbind()]
        text = json.dumps(found).encode()
        return {"seconds": seconds, "tokens": sum(map(len, found)), "checksum": zlib.crc32(text)}

    def _stream(self, device: str) -> Any:
        """What brings weights of a GPU to the engine there, as a reshard of one process does."""
        import torch

        from rlflow.contract.values import Shard
        from rlflow.engines.reshard.streaming import BucketStream, Lending
        from rlflow.scheduler.plan.plan import UPDATE_BUCKET

        source = {
            name: Shard(shape=tuple(t.shape), box=tuple((0, n) for n in t.shape), tensor=t)
            for name, t in self.weights.items()
        }
        lent = [Lending((0,), self.model.taker())]
        return BucketStream(
            source, lent, None, device=torch.device(device), limit=UPDATE_BUCKET, check=False
        )

    def update(self) -> dict[str, Any]:
        """All weights from tensors of this process to the engine."""
        began = time.perf_counter()
        if self.stream is None:
            self.rollout.update_weights(self.weights, self.model.version + 1)
        else:
            self.stream.run()
            self.model.loaded(self.model.version + 1)
        return {"seconds": time.perf_counter() - began}


def main() -> None:
    """Start both sides, take turns, print the table and write it."""
    options = parsed()
    python = os.environ.get("RLFLOW_SGLANG_PYTHON") or str(ROOT / ".venv-sglang/bin/python")
    require_sglang(python)
    facts = machine()
    (CACHE / "logs").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rlflow-bench-") as folder:
        path = configured(options) if options.device != "cpu" else folder
        if options.device == "cpu":
            write_config(path, options.layers, options.hidden)
        say("starting both engines")
        tokens = 2 * options.requests * (options.prompt_tokens + options.new_tokens)
        ours = Ours(path, python, tokens, options.device)
        try:
            message = ours.launch.message(False)
            given = {**message["arguments"], "bench_device": options.device}
            bare = Bare(python, ours.launch.command.environment, given)
            try:
                cases, size = measured(ours, bare, options)
            finally:
                bare.close()
        finally:
            ours.model.close()
    model = f"{options.layers} layers x {options.hidden}"
    if options.device != "cpu":
        model = f"a Qwen2 of {options.size} on {options.device}"
    told = f"SGLang {bare.facts['sglang']}, {model}, {size}."
    rows = [case.row() for case in cases]
    print(text_table(HEADER, rows))
    page = markdown_report(
        "SGLang through rlflow beside bare SGLang",
        facts,
        [told, markdown_table(HEADER, rows)],
        NOTES,
    )
    data = {"machine": facts, "options": vars(options), "cases": [c.as_json() for c in cases]}
    name = "vs_sglang" if options.device == "cpu" else "vs_sglang_gpu"
    write_results(CACHE / "quick" if options.quick else RESULTS, name, data, page)


def require_sglang(python: str) -> None:
    """Leave the comparison out, and end well, where an interpreter has no SGLang."""
    command = [python, "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('sglang'))"]
    try:
        found = subprocess.run(command, check=False, capture_output=True).returncode == 0
    except OSError:
        found = False
    if not found:
        say(f"left out: {python} has no SGLang (RLFLOW_SGLANG_PYTHON names another interpreter)")
        raise SystemExit(0)


def configured(options: argparse.Namespace) -> str:
    """The directory of the config of a size for GPUs."""
    from turns import MODEL_SIZES, model_directory

    context = options.prompt_tokens + options.new_tokens + 8
    return str(model_directory(MODEL_SIZES[options.size], context))


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=11, help="turns of each side")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--size", default="1.5b", help="of a model on a GPU: 0.5b or 1.5b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument(
        "--quick", action="store_true", help="2 small turns; results/ is left alone"
    )
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.requests, options.new_tokens = 2, 32, 8
    return options


def write_config(path: str, layers: int, hidden: int) -> None:
    """The config of a Qwen2 of these sizes, in a directory."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(path)


def measured(ours: Ours, bare: Bare, options: argparse.Namespace) -> tuple[list[Case], str]:
    """Turns of rollouts and of updates, after one of each that does not count; what an update is.

    Raises SystemExit where the sides make different tokens.
    """
    stop(bare.group)
    stop(ours.group)
    rollouts: list[tuple[float, float]] = []
    updates: list[tuple[float, float]] = []
    size = 0
    for turn in range(options.pairs + 1):
        say(f"pair {turn} of {options.pairs}")
        given = prompts(turn, options)
        sampling = {
            "max_new_tokens": options.new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "skip_special_tokens": False,
        }
        found: dict[str, dict[str, Any]] = {}
        changed: dict[str, dict[str, Any]] = {}
        for side in ("ours", "bare") if turn % 2 else ("bare", "ours"):
            with working(ours.group if side == "ours" else bare.group):
                if side == "ours":
                    found[side] = ours.generate(given, options.new_tokens)
                    changed[side] = ours.update()
                    continue
                asked = {"do": "generate", "prompts": given, "sampling": sampling}
                found[side] = bare.ask(asked)
                changed[side] = bare.ask({"do": "update"})
        same = found["ours"]["checksum"] == found["bare"]["checksum"]
        if not same and options.device != "cpu":
            say(f"turn {turn}: a GPU in bfloat16 made other tokens on the two sides")
        elif not same:
            raise SystemExit(f"the sides made different tokens in turn {turn}")
        size = changed["bare"]["bytes"]
        if turn:
            rollouts.append((found["ours"]["seconds"], found["bare"]["seconds"]))
            updates.append((changed["ours"]["seconds"], changed["bare"]["seconds"]))
    work = f"{options.requests} requests, {options.prompt_tokens} + {options.new_tokens} tokens"
    cases = [case(f"rollout, {work}", rollouts, TARGET), case("weight update", updates, None)]
    return cases, f"{size / 1e6:.1f} MB of weights"


def case(name: str, pairs: list[tuple[float, float]], target: float | None) -> Case:
    """A case of the seconds of its pairs."""
    ours, bare = zip(*pairs, strict=True)
    return Case(name=name, ours=ours, bare=bare, target=target)


def prompts(turn: int, options: argparse.Namespace) -> list[list[int]]:
    """Prompts that no other turn has, a function of the turn."""
    import random

    source = random.Random(turn)
    return [
        [source.randrange(VOCABULARY) for _ in range(options.prompt_tokens)]
        for _ in range(options.requests)
    ]


@contextmanager
def working(group: int) -> Iterator[None]:
    """The processes of a side go on inside, and are stopped again after it."""
    os.killpg(group, signal.SIGCONT)
    try:
        yield
    finally:
        stop(group)


def stop(group: int) -> None:
    """Stop the processes of a side."""
    os.killpg(group, signal.SIGSTOP)


if __name__ == "__main__":
    main()

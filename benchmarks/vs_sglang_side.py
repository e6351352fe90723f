"""The bare side of `vs_sglang.py`: `sgl.Engine` alone, in the interpreter that it belongs to.

Reads one JSON object a line and answers with one: first the arguments of the engine, then what to
`do`. It knows nothing of rlflow. Its results go to the standard output as it was at the start;
what SGLang prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from typing import Any, TextIO


def generate(engine: Any, prompts: list[list[int]], sampling: dict[str, Any]) -> dict[str, Any]:
    """The responses of all prompts, with log-probs: seconds, tokens and their checksum."""
    began = time.perf_counter()
    asked = engine.async_generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    made = engine.loop.run_until_complete(asked)
    seconds = time.perf_counter() - began
    rows = [[entry[1] for entry in row["meta_info"]["output_token_logprobs"]] for row in made]
    text = json.dumps(rows).encode()
    return {"seconds": seconds, "tokens": sum(map(len, rows)), "checksum": zlib.crc32(text)}


def update(engine: Any, weights: list[tuple[str, Any]]) -> dict[str, Any]:
    """All weights from this process's memory, in one flattened bucket and one session."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    began = time.perf_counter()
    bucket = FlattenedTensorBucket(named_tensors=weights)
    piece = {
        "flattened_tensor": bucket.get_flattened_tensor(),
        "metadata": bucket.get_metadata(),
    }
    session = hasattr(engine, "begin_weight_update")
    if session:
        engine.begin_weight_update()
    done = engine.update_weights_from_tensor(
        [MultiprocessingSerializer.serialize(piece)], load_format="flattened_bucket"
    )
    if session:
        engine.end_weight_update()
    seconds = time.perf_counter() - began
    if not done[0]:
        raise SystemExit(f"the update was refused: {done[1]}")
    return {"seconds": seconds, "bytes": sum(tensor.nbytes for _, tensor in weights)}


def held(path: str, device: str) -> list[tuple[str, Any]]:
    """The weights of a model's directory, on the engine's device."""
    from pathlib import Path

    from safetensors.torch import load_file

    files = sorted(Path(path).glob("*.safetensors"))
    return [item for file in files for item in load_file(str(file), device=device).items()]


def main() -> None:
    """Answer until the input ends."""
    results: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import sglang

    start = json.loads(sys.stdin.readline())
    device = start["arguments"].pop("bench_device", "cpu")
    engine = sglang.Engine(**start["arguments"])
    weights = held(start["arguments"]["model_path"], device)
    results.write(json.dumps({"sglang": sglang.__version__}) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "update":
            found = update(engine, weights)
        else:
            found = generate(engine, asked["prompts"], asked["sampling"])
        results.write(json.dumps(found) + "\n")
    engine.shutdown()


if __name__ == "__main__":
    main()

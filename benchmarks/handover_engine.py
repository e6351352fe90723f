"""An engine that has its answers already: a process of its own, which rlflow asks as any other.

It is run by its path in an interpreter that finds `rlflow_engine_process`, with the rows that it
is to answer in the variable HANDOVER. Each is made into a message as one of SGLang's is.
"""

from __future__ import annotations

import asyncio
import json
import os
from multiprocessing.connection import Connection
from typing import Any

from handover_rows import answers
from rlflow_engine_process.server import Server, connected
from rlflow_engine_process.sglang_rows import answered


class Answering(Server):
    """Answers every generation with the same rows."""

    def __init__(self, connection: Connection, spec: dict[str, Any]) -> None:
        super().__init__(connection)
        made = answers(spec["rows"], spec["response"], ragged=spec["ragged"])
        self.made = [
            {
                "meta_info": {
                    "output_token_logprobs": [(p, t, None) for t, p in zip(*row, strict=True)],
                    "finish_reason": {
                        "type": "stop" if len(row[0]) < spec["response"] else "length"
                    },
                    "weight_version": "0",
                }
            }
            for row in made
        ]

    async def do_generate(self, call: int, rows: list[Any], **more: Any) -> None:
        """Send every row that is asked for."""
        for row, _, _ in rows:
            self.send(answered(call, row, self.made[row]))


def main() -> None:
    """Serve until the worker is gone."""
    connection = connected()
    connection.recv()
    server = Answering(connection, json.loads(os.environ["HANDOVER"]))
    server.send({"ready": {"pool_tokens": 10**9}})
    asyncio.run(server.run())


if __name__ == "__main__":
    main()

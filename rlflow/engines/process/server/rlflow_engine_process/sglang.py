"""SGLang behind a socket: an engine, its rows and its weights, on the engine's own event loop."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from .held import HeldWeights
from .server import connected, end, refuse_start
from .sglang_adapters import Adapting, without_adapters
from .sglang_rows import Generating
from .sglang_ways import Receiving
from .sglang_weights import require_selectors


class SGLangServer(Generating, Receiving, Adapting):
    """Answers requests with an engine; `start` is what its worker has told it."""

    def __init__(self, engine: Any, connection: Connection, start: dict[str, Any]) -> None:
        super().__init__(connection)
        self.engine = engine
        self.tokenizer = engine.tokenizer_manager
        self.held = HeldWeights(start["held"])
        self.drafted = HeldWeights(start["draft"]) if "draft" in start else None
        self.drafts = "speculative_draft_model_path" in start["arguments"]
        if self.drafts:
            require_selectors()
        self.ranks = int(start["ranks"])
        self.device = str(start["arguments"]["device"])
        self.version = start["version"]
        self.based = self.version is not None
        if start["adapters"] is not None:
            self.adapters = start["adapters"]
            self.held, self.halves = (HeldWeights(part) for part in without_adapters(start["held"]))
        self.asleep = set()

    async def adapted(self) -> None:
        """Load the adapters that the weights of a first start have beside them."""
        if self.halves is not None and self.version is not None:
            await self.adapt(self.version)

    def facts(self) -> dict[str, Any]:
        """What a worker wants to know of a started engine."""
        import sglang
        import torch

        told = getattr(self.engine, "_scheduler_init_result", None)
        info = told.scheduler_infos[0] if told else self.engine.scheduler_info
        made = {"sglang": sglang.__version__, "torch": torch.__version__, "pid": os.getpid()}
        return {**made, "pool_tokens": int(info["max_total_num_tokens"])}

    def moved(self) -> object:
        """SGLang hears of every running request at least each fifty tokens."""
        return float(self.tokenizer.last_receive_tstamp), self.touched


def help_along(connection: Connection) -> NoReturn:
    """Be a part of an engine that another host's part answers for, until any of them is gone.

    Whatever the worker of this part sends, it has nothing to say but its end.
    """
    connection.send({"ready": {"pid": os.getpid(), "pool_tokens": 0}})
    ranks = [process.sentinel for process in multiprocessing.active_children()]
    wait([connection, *ranks])
    end()


def main() -> None:
    """Start the engine that the first message describes, and answer for it."""
    connection = connected()
    start = connection.recv()
    try:
        import sglang

        engine = sglang.Engine(**start["arguments"])
        if start["arguments"].get("node_rank", 0) > 0:
            help_along(connection)
        server = SGLangServer(engine, connection, start)
        facts = server.facts()
        engine.loop.run_until_complete(server.adapted())
    except BaseException as error:
        refuse_start(connection, error)
    server.send({"ready": facts})
    engine.loop.run_until_complete(server.run())

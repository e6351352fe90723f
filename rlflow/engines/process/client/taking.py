"""An update that an engine takes bucket by bucket from the memory of devices.

The staging gets a copy of each bucket meanwhile, so that a lost engine is filled from there. This
file knows neither where buckets come from nor what becomes of a lost engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from rlflow.engines.hf.weights.in_files import Entry
from rlflow.engines.process.client.link import Link, LostError, RefusedError
from rlflow.engines.process.client.shared_weights import SharedWeights
from rlflow.engines.reshard.ipc import Handle


class BucketTaker:
    """Takes the buckets of one update for the engine of `link`.

    What goes wrong is raised at the end, by `shut`: until then the other ranks go on.
    """

    def __init__(self, staging: SharedWeights, link: Callable[[], Link]) -> None:
        self._staging = staging
        self._find = link
        self._link: Link | None = None
        self._error: LostError | RefusedError | None = None

    @property
    def begun(self) -> bool:
        """Whether an update has begun that has not ended."""
        return self._link is not None

    def wanted(self) -> Mapping[str, Tensor]:
        """The staging."""
        return self._staging.tensors

    def open(self) -> None:
        """Have the engine wait until no request is left, and expect buckets."""
        self._link, self._error = self._find(), None
        self._ask("open", {})()

    def take(self, rows: Sequence[Entry], handles: Sequence[Handle]) -> Callable[[], None]:
        """Have the engine load a bucket; what waits until it has."""
        bucket = self._staging.names.rows(rows)
        return self._ask("take", {"bucket": bucket, "handles": list(handles)})

    def keep(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights to the staging."""
        for name, tensor in weights.items():
            self._staging.tensors[name].copy_(tensor, non_blocking=True)

    def shut(self, version: int) -> str:
        """End the update; the version that the engine then reports.

        Raises what went wrong since `open`: LostError, RefusedError.
        """
        link, self._link = self._link, None
        if self._error is not None:
            raise self._error
        assert link is not None, "no update has begun"
        return str(link.ask("shut", {"version": version}).result())

    def _ask(self, do: str, fields: Mapping[str, object]) -> Callable[[], None]:
        """Ask, unless something has gone wrong; what waits for the answer."""
        if self._error is not None or self._link is None:
            return lambda: None
        try:
            call = self._link.ask(do, fields)
        except LostError as error:
            self._error = error
            return lambda: None

        def wait() -> None:
            try:
                call.result()
            except (LostError, RefusedError) as error:
                self._error = self._error or error

        return wait

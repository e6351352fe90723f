"""One piece of work at a time beside the caller, whose error the caller gets when it asks."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """A thread for what a run need not wait for; used by one thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._give_up: Callable[[], None] = lambda: None

    def start(self, work: Callable[[], object], give_up: Callable[[], None]) -> None:
        """Begin some work; `give_up` makes it end soon. The work before is over: `join` first."""
        assert self._thread is None, "the work before is not over"

        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised by `check` and `join`
                self._error = error

        self._give_up = give_up
        self._thread = threading.Thread(target=run, name="saving", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the work if it has failed; does not wait."""
        if self._thread is not None and not self._thread.is_alive():
            self.join()

    def join(self) -> None:
        """Wait for the work to be over, and raise its error once."""
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Have the work end soon; its error, if any, is nobody's."""
        self._give_up()

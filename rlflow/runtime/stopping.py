"""How a run is told to stop by signals, and in how many seconds it has to be over.

The first Ctrl-C or SIGTERM lets what has begun end, the second does not. So do signals that are
repeated by who sends them, however often they come: SIGHUP of a terminal that is closed, SIGUSR1
of a scheduler that warns, SIGXCPU where the seconds of processors are used up. A scheduler that
takes the machine away sends SIGTERM once and SIGKILL some seconds later: `grace` are those seconds,
in which the run saves what it has done, or else ends with its last checkpoint before it is killed.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from weakref import WeakSet

from rlflow.errors import GraceOver
from rlflow.runtime.execute.executor import Executor

# Threads that a run which stopped at once has left to what they compute: whoever ends the
# interpreter before they have ended ends the process by SIGABRT.
LEFT_BEHIND: WeakSet[threading.Thread] = WeakSet()
REPEATED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
# Of the seconds of grace, and at least so many, what is left for processes to end.
RESERVE, LEAST = 0.1, 1.0


class Stopping:
    """Whether a run is to stop, and who asked: `preempted` where it was SIGTERM with a grace.

    `over` says that the grace has ended before the run did.
    """

    def __init__(self, grace: float | None, say: Callable[[str], None]) -> None:
        self.asked = self.preempted = self.over = False
        self._grace = grace
        self._say = say
        self._until = 0.0

    def left(self, most: float) -> float:
        """Seconds for what is done in the end, `most` where no grace ends before."""
        return max(0.0, min(most, self._until - time.monotonic())) if self.preempted else most

    @contextmanager
    def on_signals(self, executor: Executor) -> Iterator[None]:
        """First Ctrl-C: finish what has begun. Second: stop now. A grace that ends: stop now."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.preempted and number == signal.SIGTERM:
                return  # schedulers repeat themselves
            if self.asked and number in REPEATED:
                return
            within = self._grace if number == signal.SIGTERM else None
            if not self.asked or within is not None:
                self.ask(executor, within=within)
                return
            executor.interrupt()
            then = previous[signal.Signals(number)]
            if not callable(then):
                raise KeyboardInterrupt
            then(number, frame)  # as this program does at other times

        def on_alarm(number: int, frame: FrameType | None) -> None:
            self.over = True
            executor.interrupt()
            raise GraceOver

        handled = {signal.SIGINT: on_signal, signal.SIGTERM: on_signal}
        for number in REPEATED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has SIGHUP
                handled[number] = on_signal
        if self._grace is not None:
            handled[signal.SIGALRM] = on_alarm
        previous = {number: signal.signal(number, does) for number, does in handled.items()}
        try:
            yield
        finally:
            if self._grace is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def ask(self, executor: Executor, within: float | None = None) -> None:
        """Ask the run to end after what has begun, `within` so many seconds where that is said."""
        self.asked = True
        executor.stop()
        if within is None:
            self._say("stopping after what has begun; Ctrl-C again stops at once")
            return
        seconds = max(within / 2, within - max(LEAST, RESERVE * within))
        self.preempted, self._until = True, time.monotonic() + seconds
        signal.setitimer(signal.ITIMER_REAL, seconds)
        self._say(f"stopping after what has begun, within {seconds:.3g} s")

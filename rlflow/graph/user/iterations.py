"""What a user says of the iterations in which something runs: `every=` and `when=`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlflow.errors import Finding, GraphError
from rlflow.graph.schedule import ALWAYS, Window
from rlflow.graph.source import declared_at


@dataclass(frozen=True, slots=True)
class Iterations:
    """The iterations from `start` on that come before `stop`: `when=rf.Iterations(20)`.

    Raises GraphError where `start` or `stop` is no iteration, or where none lies between them.
    """

    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        given = [self.start] if self.stop is None else [self.start, self.stop]
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in given)
        if not whole or self.start < 0 or (self.stop is not None and self.stop <= self.start):
            raise GraphError(
                Finding(
                    code="E163",
                    what=f"rf.Iterations({self.start!r}, {self.stop!r}) holds no iteration",
                    where=declared_at(),
                    expected="whole numbers, 0 <= start < stop; stop=None for no end",
                )
            )


def schedule(what: str, every: Any, when: Any) -> tuple[int, Window, list[Finding]]:
    """The period and the window that were asked for, and findings where they are none."""
    findings = []
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        findings.append(
            Finding(
                code="E163",
                what=f"{what} with every={every!r}",
                where=declared_at(),
                expected="every >= 1: in iterations 0, every, 2 every, ...",
            )
        )
    if when is not None and not isinstance(when, Iterations):
        findings.append(
            Finding(
                code="E163",
                what=f"{what} with when={when!r:.60}",
                where=declared_at(),
                expected="a window of iterations, known before the run",
                fix=f"when=rf.Iterations({when.start}, {when.stop})"
                if isinstance(when, range)
                else "when=rf.Iterations(20)",
            )
        )
    if findings:
        return 1, ALWAYS, findings
    return every, ALWAYS if when is None else (when.start, when.stop), []

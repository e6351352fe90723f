"""What a rank is told to do: an action of the plan, in an iteration, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.scheduler.plan.plan import Action, Mode

Packed = list[int | str | None]


@dataclass(frozen=True, slots=True)
class Order:
    """An action by its id, the iteration that it is of, and what becomes of a part that sleeps."""

    action: str
    iteration: int
    mode: Mode | None = None

    @classmethod
    def of(cls, action: Action, iteration: int) -> Order:
        """The order to carry out an action in an iteration, as the action now stands."""
        return cls(action.id, iteration, action.mode)

    def packed(self) -> Packed:
        """A list, which Ray sends in a tenth of the time that an object takes.

        It sends each argument by itself, too, and takes its time for each.
        """
        return [self.action, self.iteration, self.mode]

    @classmethod
    def unpacked(cls, packed: Packed) -> Order:
        """The same again."""
        action, iteration, mode = packed
        return cls(action, iteration, mode)  # type: ignore[arg-type]

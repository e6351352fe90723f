"""The worker processes of a plan as the controller sees them: what each is told, where each is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from rlflow.runtime.ray.pools import Report
from rlflow.runtime.record.devices.profiled import ProfiledActions
from rlflow.runtime.record.edges.choice import Recording
from rlflow.scheduler.plan.plan import HOST

# Of a transfer the devices from which each receiver gets its rows.
Senders = Mapping[int, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a rank needs to know besides the plan; `devices` are the plan's, by rank.

    `address` is that of the rank's own node, and who knows the `token` may meet the ranks.
    """

    own: int
    devices: tuple[int, ...]
    master: str
    port: int
    device: str
    threads: int
    seed: int
    near: Path | None
    check_sync: bool
    timeout: float
    address: str = ""
    token: str = field(repr=False)
    profiled: ProfiledActions | None = None
    recording: Recording | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCalls:
    """How many collectives a rank has begun in a group: its name, and the devices of its ranks."""

    group: str
    devices: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStanding:
    """How far a rank is: collectives by the key of their group, and signs of progress."""

    counted: Mapping[str, GroupCalls]
    moves: int


class Ranks:
    """The actors of a plan by device, and where each of them is."""

    def __init__(self, actors: Mapping[int, Any], reports: Mapping[int, Report]) -> None:
        self._actors = dict(actors)
        self.reports = dict(reports)

    def actor(self, device: int) -> Any:
        """The actor of a device, or of the host."""
        return self._actors[device]

    def name(self, device: int) -> str:
        """A rank as errors call it: device, node and process."""
        report = self.reports.get(device)
        where = f" on node {report.address} (process {report.pid})" if report else ""
        return rank_name(device) + where

    def device_of(self, error: BaseException, asked: int) -> int:
        """The device whose process an error is about; the one asked where it does not say."""
        found = getattr(error, "actor_id", None)
        for device, actor in self._actors.items():
            if found and actor._actor_id.hex() == found:
                return device
        return asked

    def devices(self) -> tuple[int, ...]:
        """The devices that have a process, in order; not the host."""
        return tuple(sorted(device for device in self._actors if device != HOST))

    def everybody(self) -> tuple[int, ...]:
        """All devices, and the host."""
        return (*self.devices(), HOST)

    def all(self) -> list[Any]:
        """Every actor, the host's last."""
        return [self._actors[device] for device in self.everybody()]

    def silent(self, seconds: float, senders: Iterable[Senders] = ()) -> tuple[int, ...]:
        """The devices whose process gives no sign of life within so many seconds.

        One that only waits answers, for progress is asked beside what it does: these are frozen.
        But Ray keeps back what is asked of a process behind a call whose rows have not come, so
        that a receiver looks as frozen as its sender, by the `senders` of transfers under way: of
        the two the sender is.
        """
        asked = {actor.progress.remote("", 0): device for device, actor in self._actors.items()}
        _, late = ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
        found = {asked[reference] for reference in late}
        waiting = {
            to for each in senders for to, of in each.items() if found.difference({to}) & {*of}
        }
        return tuple(sorted(found - waiting or found))

    def standing(self, seconds: float) -> dict[int, RankStanding]:
        """How far each device's rank is, of those that answer within so many seconds."""
        asked = {self._actors[device].standing.remote(): device for device in self.devices()}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
        found = {}
        for reference in done:
            with contextlib.suppress(ray.exceptions.RayActorError):  # which is told elsewhere
                found[asked[reference]] = ray.get(reference)
        return found

    def kill(self) -> None:
        """Stop every process now."""
        for actor in self._actors.values():
            with contextlib.suppress(Exception):
                ray.kill(actor)


def rank_name(device: int) -> str:
    """A device as errors call it."""
    return "the host worker" if device == HOST else f"rank of device {device}"

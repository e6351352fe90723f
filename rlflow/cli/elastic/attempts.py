"""`rlflow run --elastic`: a run that loses devices goes on, on what is left, and grows again.

Every attempt is an ordinary run that resumes from the newest checkpoint with another number of
devices, so its numbers are those of a run that was stopped there and resumed on that placement.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlflow.cli.commands import Target, changed, cluster_of, declare, devices_for
from rlflow.cli.config import named_placement
from rlflow.cli.elastic.room import WantedDevices, left_of, seen_twice
from rlflow.errors import DeviceLostError, Finding, RlflowError, RunError, UsageError
from rlflow.graph.placement import in_shares
from rlflow.runtime.record.resuming import has_begun, newest
from rlflow.runtime.record.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlflow.runtime.run import Run

# Losses with no checkpoint between them, after which the run ends: the fault is not a device's.
TRIES = 3
LOOK_SECONDS = 5.0


class Ended(Protocol):
    """How an attempt ended: its directory, None where nothing ran, and the iterations it has."""

    @property
    def run_dir(self) -> Path | None:
        """The run's directory."""

    @property
    def iterations(self) -> int:
        """Iterations that are done."""


Outcome_co = TypeVar("Outcome_co", bound=Ended, covariant=True)


class Attempt(Protocol[Outcome_co]):
    """One start of the run, with the options of `rlflow run`."""

    def __call__(self, *, options: dict[str, Any]) -> Outcome_co:
        """Run to the end, or until it is asked to go on elsewhere."""


@dataclass(slots=True)
class Growth:
    """What one attempt tells: the run once it is there, which ends early where it may grow."""

    wanted: WantedDevices
    have: int
    directory: Path | None = None
    asked: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def take(self, run: Run, directory: Path) -> None:
        """The run of this attempt, with its models loaded."""
        self.directory, self.asked = directory, run.settings.iterations
        if self.have < self.wanted.cluster.count and self.wanted.address is not None:
            more = seen_twice(self.wanted, self.have, run.machine.room)
            looking = threading.Thread(
                target=self._look, args=(more, run.hand_over), name="more devices", daemon=True
            )
            looking.start()

    def _look(self, more: Callable[[], bool], hand_over: Callable[[], None]) -> None:
        while not self._over.wait(LOOK_SECONDS):
            try:
                if more():
                    hand_over()
                    return
            except RlflowError:
                continue  # the run itself tells what has become of the cluster

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look for more devices no longer than what is inside."""
        try:
            yield
        finally:
            self._over.set()


def run_elastic(
    attempt: Attempt[Outcome_co], options: Mapping[str, Any], say: Callable[[str], None]
) -> Outcome_co:
    """Run to the end on whatever of the wanted devices is there; `say` is told what changes.

    Raises UsageError E257 where the placement has no shares to change, RunError E780 where too few
    devices are left, and the error of a loss that comes again without a checkpoint between.
    """
    wanted = _wanted(options)
    have, losses, resume = wanted.cluster.count, 0, options["resume"]
    path: Path | None = None
    while True:
        growth, before = Growth(wanted, have), _saved(path)
        now = {**options, "backend": "ray", "resume": resume, "left": have, "growth": growth}
        if path is not None:
            now["from_weights"] = None  # the run knows where it began
        try:
            with growth.looking():
                outcome = attempt(options=now)
        except DeviceLostError as error:
            if not losses and growth.directory is None:
                raise  # nothing had begun: it is an error as ever
            path = _there(growth.directory or path)
            losses = 1 if _saved(path) > before else losses + 1
            if losses > TRIES:
                raise
            left = left_of(wanted, options["wait"] or 0.0)
            if not left:
                raise _too_few(wanted, error) from error
            say(_told(error, wanted, have, left))
        else:
            if outcome.run_dir is None or outcome.iterations >= growth.asked:
                return outcome
            path, losses = outcome.run_dir, 0
            left = left_of(wanted, 0.0) or have
            say(f"elastic: {_counts(wanted, have, left)}: going on with them")
        have, resume = left, options["resume"] if path is None else str(path)


def _wanted(options: Mapping[str, Any]) -> WantedDevices:
    """The devices and the placement asked for; UsageError where they cannot become fewer."""
    if options["backend"] == "local":
        what = "--elastic needs processes that can be lost, --backend local has none"
        raise UsageError(Finding(code="E257", what=what, fix="--backend ray"))
    target = Target(**{key: options[key] for key in options.keys() & Target.__slots__})
    declared = declare(target)
    name, placement = named_placement(declared.pipeline, target.placement)
    placement = changed(declared, placement, target)
    count = cluster_of(target, devices_for(placement, target)).count
    if not placement.shares:
        fixed = placement.num_devices()
        shared = in_shares(placement, fixed)
        raise UsageError(
            Finding(
                code="E257",
                what=f"--elastic: placement {name!r} is for {fixed} device{'s' * (fixed != 1)} "
                "and no other number",
                got=f"pools={dict(placement.pools)}",
                expected='pools that are shares of all devices: "*", "3/4"',
                fix=f"pools={dict(shared.pools)}" if shared.shares else 'pools={"all": "*"}',
            )
        )
    cluster = cluster_of(target, placement.at(count, name).num_devices())
    return WantedDevices(placement=placement, cluster=cluster, address=options["address"])


def _there(path: Path | None) -> Path | None:
    """The directory of a run that has begun; one in which no iteration had is removed again."""
    return path if path is not None and has_begun(RunDir(path, None)) else None


def _saved(path: Path | None) -> int:
    """How many iterations the newest checkpoint of a run has done, 0 without one."""
    manifest = None if path is None else newest(RunDir.view(path))
    return 0 if manifest is None else manifest.iteration


def _counts(wanted: WantedDevices, have: int, left: int) -> str:
    kind, most = wanted.cluster.kind.chip, wanted.cluster.count
    shared = wanted.placement.at(left).devices()
    pools = ", ".join(f"{name}: {len(devices)}" for name, devices in shared.items())
    return f"{left} of {most} {kind} devices where it had {have} ({pools})"


def _told(error: DeviceLostError, wanted: WantedDevices, have: int, left: int) -> str:
    """One line that says what was lost, and on what the run goes on."""
    (finding, *_) = error.findings
    cause = f" ({finding.got.splitlines()[0]})" if finding.got else ""
    where = _counts(wanted, have, left)
    return f"elastic: {finding.what}{cause}; going on from the newest checkpoint on {where}"


def _too_few(wanted: WantedDevices, error: DeviceLostError) -> RunError:
    """No device, or fewer than the placement divides, are there in time."""
    return RunError(
        *error.findings,
        Finding(
            code="E780",
            what="too few devices are left to go on with",
            expected=f"at least {wanted.placement.most_of(1)} {wanted.cluster.kind.chip} free on "
            "nodes that answer",
            fix="--wait 10m, for nodes to come back",
        ),
        summary=error.summary,
    )

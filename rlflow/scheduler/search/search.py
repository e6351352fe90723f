"""The search of `tune`: which candidates are compiled, in what order, and what they come to.

The budget is a count of plans, so that equal input gives equal output. What a person would
write is compiled first: nothing found is worse than the best of it.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.graph.placement import On, Placement
from rlflow.scheduler.passes.portions import with_shares_of
from rlflow.scheduler.passes.staleness import allowed
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.search.candidates import WORTH, Moves
from rlflow.scheduler.search.engines import with_ngrams
from rlflow.scheduler.search.ranges import pattern
from rlflow.scheduler.search.space import Candidate, hand_written, placement_of

CLIMBED = 3
HELPED = 4
"""How many placements whose rollouts are apart get help of devices that train."""
"""As many as show what iterations that differ come to."""
WAITING_LESS: tuple[Mapping[str, object], ...] = (
    {"virtual": 2},
    {"virtual": 4},
    {"schedule": "zero-bubble"},
)
"""What is tried where a rank has one of several stages, and waits for others."""
PLAN_COST = 0.5
CHUNK_COST = 0.5
AUTO_CHUNKS = 15
REASONS = {
    "E401": "memory",
    "E405": "host memory",
    "E402": "staleness",
    "E228": "staleness",
    "E212": "layout",
    "E213": "layout",
    "E216": "layout",
    "E218": "layout",
    "E214": "rows",
    "E220": "rows",
    "E221": "rows",
    "E224": "rows",
}
OTHER = "other reasons"
Rank = tuple[float, int, int, int, int, int, bool, str]
Kind = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A placement and its plan; `name` is that of a placement of the pipeline, else empty."""

    name: str
    placement: Placement
    plan: Plan
    candidate: Candidate | None = None

    @property
    def period(self) -> float:
        """Seconds an iteration; where iterations differ, as they come to one after the other."""
        return self.plan.timing.seconds if self.plan.timing else float("inf")

    @property
    def devices(self) -> int:
        """How many devices the placement uses."""
        return len({d for devices in self.plan.pools.values() for d in devices})

    def rank(self) -> Rank:
        """The order of placements: period, then what comes to the same with less, or was there."""
        peak = max(self.plan.peaks.values(), default=0)
        text = self.placement.model_dump_json()
        period, pools = float(f"{self.period:.6g}"), len(self.placement.pools)
        size = pools, len(self.plan.actions), peak
        return period, self.plan.staleness, self.devices, *size, not self.name, text


@dataclass(slots=True, kw_only=True)
class Search:
    """What was compiled so far. `compiler` makes a plan, named, and verified where asked.

    `codes` are what plans were refused for.
    """

    graph: Graph
    moves: Moves
    compiler: Callable[[Placement, str, bool], Plan]
    budget: float
    top: int
    compiled: int = 0
    misfits: dict[str, str] = field(default_factory=dict)
    last_error: PlanError | None = None
    codes: set[str] = field(default_factory=set)
    seen: set[tuple[str, int]] = field(default_factory=set)
    best: dict[Kind, Tried] = field(default_factory=dict)
    written: dict[str, Tried] = field(default_factory=dict)
    ranks: list[tuple[Rank, Kind]] = field(default_factory=list)

    def compile_written(self, placements: Mapping[str, Placement], count: int) -> None:
        """Compile the placements of the pipeline, and each with larger pools."""
        for name, placement in hand_written(placements, count).items():
            stale = allowed(self.graph, placement)
            if stale > self.moves.staleness:
                self.misfits[name] = f"staleness={stale}, allowed is {self.moves.staleness}"
            else:
                self._compile(placement, name=name)

    def compile_usual(self) -> None:
        """Compile what a person would try."""
        for ranges in self.moves.usual():
            self._try_all(self.moves.of_ranges(ranges))

    def compile_promising(self) -> None:
        """Compile candidates by their estimates until half of the budget is spent."""
        heap = self.moves.promising()
        heapq.heapify(heap)
        half = self.budget / 2
        while heap and self.budget > half:
            self._try(heapq.heappop(heap)[1])

    def climb(self) -> None:
        """Change the best candidates one choice at a time, as long as there are better ones."""
        done: set[Candidate] = set()
        while self.budget > 0:
            leading = [tried.candidate for tried in self.ranked()[:CLIMBED]]
            following = next((c for c in leading if c is not None and c not in done), None)
            if following is None:
                return
            done.add(following)
            bounds = self.moves.bounds
            near = {(bounds.estimate(c), c) for c in self.moves.neighbours(following)}
            self._try_all(candidate for _, candidate in sorted(near))

    def compile_continuous(self) -> None:
        """Have rollouts of the best placements never drain.

        Nothing is said of those that cannot.
        """
        for tried in self.ranked()[:CLIMBED]:
            for staleness in range(1, self.moves.staleness + 1):
                said = {"continuous": True, "staleness": staleness, "stream": 1}
                self._compile(tried.placement.model_copy(update=said), quiet=True)

    def compile_drafting(self) -> None:
        """Have engines of the best placements draft by n-grams, where that saves enough.

        Nothing is said of those that cannot.
        """
        for tried in self.ranked()[:CLIMBED]:
            for placement in with_ngrams(self.graph, tried.placement):
                self._compile(placement, quiet=True, below=tried.period * WORTH)

    def compile_staged(self) -> None:
        """Have ranks of the best placements with stages wait less for each other.

        By several stages on each, or where they train by backwards in two halves. Nothing is said
        of what cannot have them.
        """
        untrained = {role.key for role in self.moves.roles if not role.trained}
        for tried in self.ranked()[:CLIMBED]:
            for said in WAITING_LESS:
                left = untrained if "schedule" in said else ()
                assign = {
                    key: on.model_copy(update=said) if on.pp and key not in left else on
                    for key, on in tried.placement.assign.items()
                }
                if assign != tried.placement.assign:
                    found = tried.placement.model_copy(update={"assign": assign})
                    self._compile(found, quiet=True)

    def compile_helped(self) -> None:
        """Have devices that train help with rollouts that are apart from them.

        Of the best placements and those with a cut elsewhere, where what is apart is busier, and
        first by those where all devices together would be busy for the shortest. Help that saves
        hardly anything is not taken, and nothing is said of what cannot be helped.
        """
        ranked = [tried for tried in self.ranked() if tried.candidate is not None]
        timed = {tried.candidate: tried.plan.timing for tried in ranked}
        near = {
            other: None
            for candidate in list(timed)[: 2 * CLIMBED]
            if candidate is not None
            for other in (candidate, *self.moves.moved_cuts(candidate))
        }
        found = [(work, c) for c in near if (work := self.moves.work_apart(c)) is not None]
        for _, candidate in sorted(found)[:HELPED]:
            plain = placement_of(candidate, self.moves.roles, self.graph.staleness)
            alone = timed.get(candidate)
            if alone is None:
                self.compiled += 1
                with suppress(PlanError):
                    alone = self.compiler(plain, "tuned", False).timing
            below = float("inf") if alone is None else alone.seconds * WORTH
            self._compile(self._helped(plain, candidate), quiet=True, below=below)

    def _helped(self, placement: Placement, candidate: Candidate) -> Placement:
        """The placement with every rollout that is apart helped by what trains its model."""
        homes = {key: where.pool for key, where in placement.assign.items()}
        assign = dict(placement.assign)
        for role, choice in zip(self.moves.roles, candidate.choices, strict=True):
            if role.source is None or not role.rollout or role.key not in assign:
                continue
            source = self.moves.roles[role.source]
            home = homes.get(source.key, homes["*"])
            if candidate.choices[role.source].range != choice.range:
                helping = On(pool=home, tp=assign[role.key].tp, engine=assign[role.key].engine)
                assign[role.key] = assign[role.key].model_copy(update={"also": helping})
        return placement.model_copy(update={"assign": assign})

    def one_reason(self) -> PlanError | None:
        """What refused every plan, where that is one thing and no lack of room; else None."""
        counted = set(self.moves.refused) - {OTHER}
        if counted or len(self.codes) != 1 or not self.codes.isdisjoint(REASONS):
            return None
        return self.last_error

    def ranked(self) -> list[Tried]:
        """The best placement of every kind, best first."""
        return [self.best[kind] for _, kind in self.ranks]

    def _try_all(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            if self.budget <= 0:
                return
            self._try(candidate)

    def _try(self, candidate: Candidate) -> None:
        """Compile a candidate unless it cannot be the best of its kind, or among those shown."""
        ranges = [range(*choice.range) for choice in candidate.choices]
        if candidate.staleness > self.moves.staleness:
            return
        known = self.best.get((pattern(ranges), candidate.staleness))
        longest = known.period if known is not None else float("inf")
        if len(self.ranks) >= self.top:
            longest = min(longest, self.ranks[self.top - 1][0][0])
        if self.moves.bounds.period(candidate) < longest:
            stale = self.graph.staleness
            placement = placement_of(candidate, self.moves.roles, stale)
            self._compile(placement, candidate=candidate)

    def _compile(
        self,
        placement: Placement,
        *,
        name: str = "",
        candidate: Candidate | None = None,
        quiet: bool = False,
        below: float = float("inf"),
    ) -> None:
        """Make the plan of a placement, not verified, and see where it ranks if it is `below` that.

        Where it is `quiet`, nobody hears of a refusal.
        """
        stale = allowed(self.graph, placement)
        key = placement.model_dump_json(), stale
        if key in self.seen and not name:
            return
        self.seen.add(key)
        self.compiled += 1
        chunks = placement.stream if isinstance(placement.stream, int) else AUTO_CHUNKS
        self.budget -= PLAN_COST + CHUNK_COST * chunks
        try:
            plan = self.compiler(placement, name or "tuned", False)
        except PlanError as error:
            if quiet:
                return
            self.last_error = error
            self.codes.add(error.findings[0].code)
            if name:
                self.misfits[name] = error.findings[0].what
            else:
                why = REASONS.get(error.findings[0].code, OTHER)
                self.moves.refused[why] += 1
                if why == "staleness":
                    self.moves.staleness = min(self.moves.staleness, stale - 1)
            return
        found = Tried(
            name=name, placement=with_shares_of(placement, plan), plan=plan, candidate=candidate
        )
        if name:
            self.written[name] = found
        if found.period <= below:
            self._rank(found)

    def _rank(self, found: Tried) -> None:
        """Keep a placement where it is the best of its kind: a pattern of roles, a staleness."""
        devices: dict[str, set[int]] = {}
        for run in (a for a in found.plan.actions if a.kind == "run" and a.pool != "host"):
            devices.setdefault(found.plan.graph.node(str(run.node)).drawn_as, set()).update(
                run.devices
            )
        held = [devices.get(role.nodes[0].name, ()) for role in self.moves.roles]
        kind = pattern(held), found.plan.staleness
        known = self.best.get(kind)
        if known is not None:
            if known.rank() <= found.rank():
                return
            self.ranks.remove((known.rank(), kind))
        self.best[kind] = found
        bisect.insort(self.ranks, (found.rank(), kind))

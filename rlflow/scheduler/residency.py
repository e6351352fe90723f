"""Pass `residency`: what stays in a device's memory, what sleeps and when it returns.

With the order known, next uses are known: paging with a known future (Belady 1966),
the victim is the part whose next use is farthest away; gradients go first, for they move
no byte. They are always discarded, and so are weights that a reshard will overwrite
before they are read; everything else is offloaded to the host. Nothing is put to sleep
that fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlflow.errors import Finding, PlanError
from rlflow.scheduler.cluster import amount
from rlflow.scheduler.context import Context
from rlflow.scheduler.order import device_name
from rlflow.scheduler.plan import HOST, Action, Dep, Mode, Part, Plan, Reason

MAX_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A part put to sleep or woken just before position `index` of the order."""

    index: int
    part: str
    wake: bool


def residency(plan: Plan, context: Context) -> Plan:
    """Insert sleep and wake actions, and compute the peak of every device.

    Raises PlanError where an action's own needs exceed the budget.
    """
    sizes = {part.name: part.size or 0 for part in plan.parts}
    unknown = sorted({part.instance for part in plan.parts if part.size is None})
    if unknown:
        plan = plan.noting(
            "unknown size",
            f"{', '.join(unknown)}: the files are not on this "
            "machine, so memory is not proven to fit",
        )
    start: frozenset[str] = frozenset()
    moves: list[Move] = []
    for _ in range(MAX_ROUNDS):
        moves, end = _play(plan, start, sizes)
        if end == start:
            break
        start = end
    else:
        moves, end = _play(plan, start, sizes)
        moves = [*moves, *_return_to(start, end, len(plan.actions))]
    moves, start = _without_useless(plan, moves, start, sizes)
    return _with_peaks(_insert(plan, moves, start, context))


def _play(
    plan: Plan, start: frozenset[str], sizes: dict[str, int]
) -> tuple[list[Move], frozenset[str]]:
    """One iteration from the parts awake at its start: its moves, and who is awake after."""
    awake = set(start)
    moves: list[Move] = []
    for index, action in enumerate(plan.actions):
        needed = set(action.needs)
        for victim in _victims(plan, index, awake | needed, needed, sizes):
            if victim in awake:
                moves.append(Move(index=index, part=victim, wake=False))
            awake.discard(victim)
        for part in action.needs:
            if part not in awake:
                moves.append(Move(index=index, part=part, wake=True))
                awake.add(part)
    return moves, frozenset(awake)


def _without_useless(
    plan: Plan, moves: list[Move], start: frozenset[str], sizes: dict[str, int]
) -> tuple[list[Move], frozenset[str]]:
    """Drop wakes that nobody uses and sleeps whose part fits, each with the move that undoes it."""
    for wake in [move for move in moves if move.wake]:
        undo, slots = _until_undone(plan, moves, wake)
        if not any(wake.part in action.needs for n in slots for action in plan.actions[n : n + 1]):
            start = start - {wake.part} if undo.index <= wake.index else start
            moves = [move for move in moves if move not in (wake, undo)]
    loads = _loads(plan, moves, start, sizes)
    for sleep in [move for move in moves if not move.wake]:
        undo, slots = _until_undone(plan, moves, sleep)
        places = [(slot, device) for slot in slots for device in plan.part(sleep.part).devices]
        size = sizes[sleep.part]
        if all(loads[slot][device] + size <= plan.budget(device) for slot, device in places):
            start = start | {sleep.part} if undo.index <= sleep.index else start
            moves = [move for move in moves if move not in (sleep, undo)]
            for slot, device in places:
                loads[slot][device] += size
    return moves, start


def _until_undone(plan: Plan, moves: list[Move], move: Move) -> tuple[Move, list[int]]:
    """The next move of the same part around the cycle, and the slots of `_loads` until then."""
    at = moves.index(move)
    undo = next(m for m in (*moves[at + 1 :], *moves[:at]) if m.part == move.part)
    count = len(plan.actions) + 1
    length = (undo.index - move.index - 1) % count + 1
    return undo, [(move.index + ahead) % count for ahead in range(length)]


def _loads(
    plan: Plan, moves: list[Move], start: frozenset[str], sizes: dict[str, int]
) -> list[dict[int, int]]:
    """Bytes on every device during each action, and last at the end of the iteration."""
    devices = sorted({device for part in plan.parts for device in part.devices})
    end = Action(
        id="end", kind="run", reason=Reason(rule="end", text="end"), devices=(HOST,), pool="host"
    )
    awake = set(start)
    loads = []
    for index, action in enumerate((*plan.actions, end)):
        for move in (move for move in moves if move.index == index):
            (awake.add if move.wake else awake.discard)(move.part)
        loads.append({d: _load(plan, d, awake, action, sizes) for d in devices})
    return loads


def _victims(
    plan: Plan, index: int, awake: set[str], needed: set[str], sizes: dict[str, int]
) -> list[str]:
    """The parts to put to sleep so that action `index` fits, farthest next use first."""
    action = plan.actions[index]
    left = set(awake)
    victims = []
    devices = {d for name in needed for d in plan.part(name).devices} | set(action.devices)
    for device in sorted(devices - {HOST}):
        while _load(plan, device, left, action, sizes) > plan.budget(device):
            candidates = [p for p in left - needed if device in plan.part(p).devices]
            if not candidates:
                raise PlanError(_does_not_fit(plan, action, device, sizes))
            victim = max(candidates, key=lambda part: _farness(plan, index, part))
            left.discard(victim)
            victims.append(victim)
    return victims


def _farness(plan: Plan, index: int, name: str) -> tuple[bool, int, str]:
    """How readily a part is given up at `index`: for nothing first, then by its next use."""
    return plan.part(name).kind == "gradients", _next_use(plan, index, name), name


def _load(plan: Plan, device: int, awake: set[str], action: Action, sizes: dict[str, int]) -> int:
    held = sum(sizes[part] for part in awake if device in plan.part(part).devices)
    return held + ((action.cost.transient or 0) if device in action.devices else 0)


def _next_use(plan: Plan, index: int, part: str) -> int:
    """How many positions after `index`, around the cycle, the part is needed next."""
    count = len(plan.actions)
    for ahead in range(1, count + 1):
        if part in plan.actions[(index + ahead) % count].needs:
            return ahead
    return count + 1


def _does_not_fit(plan: Plan, action: Action, device: int, sizes: dict[str, int]) -> Finding:
    holders = sorted(
        ((sizes[name], name) for name in action.needs if device in plan.part(name).devices),
        reverse=True,
    )
    rows = [f"{amount(size)} {name}" for size, name in holders]
    rows.append(f"{amount(action.cost.transient or 0)} used while it runs")
    total = sum(size for size, _ in holders) + (action.cost.transient or 0)
    return Finding(
        code="E401",
        what=f"action {action.id!r} does not fit on {device_name(plan, device)}",
        where=plan.graph.node(action.node).where if action.node else None,
        got=f"{amount(total)} at once:\n" + "\n".join(rows),
        expected=f"at most {amount(plan.budget(device))}, the memory of one device",
        fix="more devices in the pool, a smaller batch, or more mini_batches in the update",
    )


def _return_to(start: frozenset[str], end: frozenset[str], index: int) -> list[Move]:
    """Moves at the end of the iteration that bring back the state it began with."""
    asleep = [Move(index=index, part=part, wake=False) for part in sorted(end - start)]
    return asleep + [Move(index=index, part=part, wake=True) for part in sorted(start - end)]


def _insert(plan: Plan, moves: list[Move], start: frozenset[str], context: Context) -> Plan:
    """The plan with an action for every move, ordered against the users of its part."""
    modes = _modes(plan, moves)
    actions: list[Action] = []
    serial: dict[tuple[str, bool], int] = {}
    for index in range(len(plan.actions) + 1):
        for move in (move for move in moves if move.index == index):
            key = (move.part, move.wake)
            number = serial[key] = serial.get(key, 0) + 1
            actions.append(_action(plan, move, modes[move], number, context))
        if index < len(plan.actions):
            actions.append(plan.actions[index])
    awake = tuple(part.name for part in plan.parts if part.name in start)
    return replace(plan, actions=_order_moves(actions), awake_at_start=awake)


def _modes(plan: Plan, moves: list[Move]) -> dict[Move, Mode]:
    """Discard what is made anew before anyone reads it; offload the rest.

    A reshard makes all weights of an instance anew, but of a model with adapters only these.
    """
    modes: dict[Move, Mode] = {}
    for move in moves:
        part = plan.part(move.part)
        following = [*plan.actions[move.index :], *plan.actions[: move.index]]
        user = next((a for a in following if move.part in a.needs), None)
        filled = user is not None and part.instance in user.targets
        adapters = plan.graph.model(plan.instance(part.instance).model).lora is not None
        anew = part.kind == "gradients" or (filled and not adapters)
        modes[move] = "discard" if anew else "offload"
    return modes


def _action(plan: Plan, move: Move, mode: Mode, number: int, context: Context) -> Action:
    part: Part = plan.part(move.part)
    kind = "wake" if move.wake else "sleep"
    before = plan.actions[move.index].id if move.index < len(plan.actions) else "the next iteration"
    suffix = f"#{number}" if number > 1 else ""
    instance = plan.instance(part.instance)
    gradients, empty = part.kind == "gradients", mode == "discard"
    if move.wake:
        maker = "each step makes it anew" if gradients else "the reshard fills it"
        text = f"{before} needs it" + (f": allocated, {maker}" if empty else "")
        rule = "needed"
    else:
        chosen = "of no use after an update" if gradients else "farthest next use"
        text = f"{before} would not fit; {chosen}"
        text += "; overwritten before it is read" if empty and not gradients else ""
        rule = "memory"
    return Action(
        id=f"{kind}:{part.name}{suffix}",
        kind="wake" if move.wake else "sleep",
        reason=Reason(rule=rule, text=text),
        devices=part.devices,
        pool=instance.pool,
        instance=part.instance,
        part=part.name,
        mode=mode,
        cost=context.costs.copy(0 if mode == "discard" else part.size),
    )


def _order_moves(actions: list[Action]) -> tuple[Action, ...]:
    """Add what a sleep or wake has to wait for: the action on its part just before it."""
    result = []
    for index, action in enumerate(actions):
        if action.part is None:
            wakes = [a.id for a in actions[:index] if a.kind == "wake" and a.part in action.needs]
            deps = tuple(Dep(action=name, distance=0, kind="order") for name in wakes)
            result.append(replace(action, after=(*action.after, *deps)))
            continue
        users = [a.id for a in actions[:index] if action.part in (*a.needs, a.part)]
        deps = tuple(Dep(action=name, distance=0, kind="order") for name in users[-1:])
        if not deps:
            later = [a.id for a in actions[index + 1 :] if action.part in (*a.needs, a.part)]
            deps = tuple(Dep(action=name, distance=1, kind="order") for name in later[-1:])
        result.append(replace(action, after=(*action.after, *deps)))
    return tuple(result)


def _with_peaks(plan: Plan) -> Plan:
    """Memory of the fullest device during each action, and the peak of every device."""
    sizes = {part.name: part.size or 0 for part in plan.parts}
    awake = set(plan.awake_at_start)
    peaks: dict[int, int] = {device: 0 for devices in plan.pools.values() for device in devices}
    actions = []
    for action in plan.actions:
        if action.kind == "wake" and action.part:
            awake.add(action.part)
        loads = {d: _load(plan, d, awake, action, sizes) for d in action.devices if d != HOST}
        for device, load in loads.items():
            peaks[device] = max(peaks[device], load)
        if action.kind == "sleep" and action.part:
            awake.discard(action.part)
        actions.append(replace(action, peak=max(loads.values(), default=None)))
    return replace(plan, actions=tuple(actions), peaks=peaks)

"""Host memory of accelerators: what their processes keep in place for what sleeps, and loads.

A process never lets go of more than its next sleep takes: over all its sleeps it keeps the most
that it has lent at once, whatever others of the host have lent by then. Knows parts and devices,
no order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from rlflow.modelfiles.host_memory import pinned_bytes
from rlflow.scheduler.plan.plan import Part, Plan

# Bytes, when they are there, and what they are of, the largest first.
HostPeak = tuple[int, str, tuple[tuple[int, str], ...]]
Names = Counter[str]
START = "start"


def bytes_freed(part: Part) -> int:
    """Bytes that a part's sleep gives back on each of its devices."""
    return max((part.size or 0) - part.residual, 0)


def kept_in_place(
    plan: Plan, away: Mapping[str, Sequence[Part]], staying: Mapping[int, Sequence[tuple[int, str]]]
) -> HostPeak:
    """The most that a host keeps of what is `away` at each move, beside what stays all the time."""
    worst: dict[int, tuple[int, str]] = {}
    for move, parts in away.items():
        held = Counter[int]()
        for part in parts:
            for device in part.leaves:
                held[device] += pinned_bytes(bytes_freed(part))
        for device, size in held.items():
            worst[device] = max(worst.get(device, (0, "")), (size, move))
    hosts: dict[int, Names] = {host: Counter() for host in staying}
    for device, (_, move) in worst.items():
        own = hosts.setdefault(plan.host_of(device), Counter())
        for part in away[move]:
            if device in part.leaves:
                own[part.name] += pinned_bytes(bytes_freed(part))
    for host, kept in staying.items():
        for size, name in kept:
            hosts[host][name] += size
    moves = {move for _, move in worst.values()}
    return _largest(hosts, moves.pop() if len(moves) == 1 else "")


def while_loading(plan: Plan, asleep: Collection[Part], always: Iterable[Part]) -> HostPeak:
    """The most that a host holds while instances are loaded, those `asleep` at first among them."""
    hosts: dict[int, Names] = {}
    for part in asleep:
        for device in part.leaves:
            own = hosts.setdefault(plan.host_of(device), Counter())
            own[part.name] += pinned_bytes(bytes_freed(part))
    for part in always:
        add_always(plan, part, hosts)
    largest: dict[int, tuple[int, str]] = {}
    for load in plan.loads:
        for device in plan.instance(load.instance).devices:
            largest[device] = max(largest.get(device, (0, "")), (load.size, load.instance))
    for device, (size, name) in largest.items():
        hosts.setdefault(plan.host_of(device), Counter())[f"{name} while it is loaded"] += size
    return _largest(hosts, START if plan.loads else "")


def add_always(plan: Plan, part: Part, hosts: dict[int, Names]) -> None:
    """Add what a part has on the hosts of its devices all the time."""
    more = dict(part.more_on_host)
    for device in part.devices:
        own = hosts.setdefault(plan.host_of(device), Counter())
        own[part.name] += part.on_host + more.get(device, 0)


def staying_names(
    plan: Plan, staying: Mapping[int, Sequence[tuple[int, str]]], always: Iterable[Part]
) -> dict[int, list[tuple[int, str]]]:
    """What hosts hold all the time: rows, copies of saves, and of parts what is `always` there."""
    hosts: dict[int, Names] = {host: Counter() for host in staying}
    for part in always:
        add_always(plan, part, hosts)
    return {
        host: [*((size, name) for name, size in own.items()), *staying.get(host, ())]
        for host, own in hosts.items()
    }


def _largest(hosts: Mapping[int, Names], when: str) -> HostPeak:
    if not hosts:
        return 0, "", ()
    own = max(hosts.values(), key=lambda names: names.total())
    held = sorted(((size, name) for name, size in own.items() if size), reverse=True)
    return own.total(), when, tuple(held)

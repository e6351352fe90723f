"""Imports point down: one table of floors, no cycle between files, torch and ray behind doors."""

from __future__ import annotations

import ast

import networkx as nx

from tests.sources import PACKAGE, ROOT, imported, nodes, tree

# From the ground up. A file imports files of its own part and of parts on lower floors: none of
# another part on its own floor, and none above. Every import counts, also those in functions and
# those that only a type checker sees.
FLOORS = (
    ("errors",),
    ("strict", "userfiles", "batch", "modelfiles"),
    ("contract",),
    ("graph",),
    ("data", "rewards"),
    ("envs",),
    ("ops",),
    ("scheduler.devices",),
    ("scheduler.models",),
    ("scheduler.plan", "scheduler.periodic"),
    ("scheduler.memory",),
    ("scheduler.costs",),
    ("scheduler.context", "scheduler.engines"),
    ("scheduler.observed",),
    ("scheduler.passes", "scheduler.verify"),
    ("scheduler.compile",),
    ("scheduler.simulate",),
    ("scheduler.search",),
    ("engines",),
    ("runtime",),
    ("report",),
    ("cli",),
)
# Of the floors below them these see so much. `rlflow` itself is what users import.
SEES = {
    "data": {"errors", "strict"},
    "rewards": {"errors", "strict", "userfiles"},
    "envs": {"errors", "data", "rewards"},
    "graph": {"errors", "strict", "contract"},
    "scheduler": {"errors", "modelfiles", "graph", "scheduler"},
    "engines": {"errors", "batch", "modelfiles", "contract", "graph"},
    "runtime": {
        "errors",
        "userfiles",
        "batch",
        "modelfiles",
        "contract",
        "graph",
        "data",
        "ops",
        "scheduler.plan",
        "engines",
    },
    "report": {"errors", "graph", "scheduler", "runtime.record"},
    "rlflow": {"errors", "graph", "data", "rewards", "envs", "ops", "cli.door"},
}
# And beyond that, for a reason.
BESIDES = {
    ("rlflow", "cli.shell.early"): "signals may come while it is imported",
    ("runtime.preflight", "scheduler.models"): "prompts are measured against a model's context",
    ("runtime.rehearse.device", "scheduler.models"): "experts get the tokens that plans count",
    ("runtime.ray.cluster.clusters", "scheduler.devices"): "a store has a share of the memory",
    ("runtime.record.calibration", "scheduler.costs"): "a run is kept for later estimates",
    ("runtime.record.calibration", "scheduler.devices"): "a run is kept for later estimates",
    ("runtime.record.calibration", "scheduler.observed"): "a run is kept for later estimates",
}
# Files that import rlflow within a function, and what for.
DOORS = {
    "cli.main": "a command loads what it needs, not what others need",
    "cli.commands": "the devices are looked at where they are asked for",
    "cli.door.api": "a run is loaded once a plan is to run",
    "cli.door.handle": "figures and reports are read where they are asked for",
    "cli.door.shown": "pictures are drawn where they are shown",
    "cli.evaluation.command": "runs are reached when something is evaluated",
    "cli.launching.command": "a command loads what it needs, not what others need",
    "cli.looking.bisect": "rows are read where runs are compared",
    "cli.looking.idle": "spans are read once there is a run",
    "cli.looking.report": "the page is made once there is a run",
    "cli.looking.watch": "the page is made once there is a run",
    "cli.planning.command": "a command loads what it needs, not what others need",
    "cli.planning.sweeping": "pictures are drawn where they are asked for",
    "cli.rehearsal.command": "torch is loaded once a plan is rehearsed",
    "cli.looking.samples": "rows are read, and tokenizers loaded, where samples are looked at",
    "cli.simulating": "pictures are drawn where they are asked for",
    "cli.running": "torch and Ray are loaded once a plan is to run",
    "cli.measuring": "torch is loaded once something is measured",
    "cli.machines": "so are they where a plan runs in this process, or on Ray",
    "cli.stages.replay": "a run's files are read once one is replayed",
    "cli.stages.replaying": "torch is loaded where two updates are compared",
    "cli.tracing.command": "a run's files are read once one is traced",
    "cli.export": "torch is loaded once there is something to write",
    "engines.hf.forward.head_kernel.rows": "Triton is loaded where its kernels compute",
    "graph.placement": "a declaration is found where one is made",
    "report.render": "each form of picture loads its own library",
    "runtime.local": "saving is loaded where a checkpoint is due",
    "runtime.ray.made": "torch is loaded after the number of threads is set",
    "runtime.ray.rank": "torch is loaded after the number of threads is set",
    "runtime.record.edges.reading": "torch is loaded where rows become tensors again",
    "runtime.record.edges.writing": "torch is loaded where there are rows to write",
    "runtime.worker.loading": "sharded models are loaded where a layout is one",
    "runtime.worker.saving": "sharded models are loaded where a layout is one",
    "runtime.worker.world": "weights are resharded where a plan says so",
}
TORCH = ("batch", "engines", "runtime", "cli.profile", "ops.bodies", "ops.math")
# Folders whose files are imported by their own names: scripts, and what an engine's process runs.
SCRIPTS = ("benchmarks", "rlflow.engines.process.server")


def files():
    """Every file of the package and of the benchmarks by its dotted name."""
    found = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


FILES = files()


def file_of(name, importer):
    """The file that a dotted name is of, itself or a name in it; None for other packages."""
    folder = ".".join(FILES[importer].parent.relative_to(ROOT).parts)
    bases = [f"{script}." for script in SCRIPTS if f"{folder}.".startswith(f"{script}.")]
    for full in (folder + name,) if name.startswith(".") else (f"{b}{name}" for b in ("", *bases)):
        for found in (full, full.rpartition(".")[0]):
            if found in FILES:
                return found
    return None


def arrows():
    """Every file with every other that it imports."""
    for name, path in FILES.items():
        yield from {(name, file_of(n, name)) for n in imported(nodes(path))} - {(name, None)}


def below(name):
    """A dotted name without `rlflow`, which stands for itself."""
    return name.removeprefix("rlflow.")


def within(name, parts):
    """The one of some parts that a file is of, the narrowest; None if it is of none."""
    found = [part for part in parts if f"{name}.".startswith(f"{part}.")]
    return max(found, key=len, default=None)


def floor_of(name):
    parts = [part for floor in FLOORS for part in floor]
    part = within(name, parts)
    return part, next((n for n, floor in enumerate(FLOORS) if part in floor), len(FLOORS))


def package_arrows():
    return [(below(a), below(b)) for a, b in arrows() if a.startswith("rlflow") and a != b]


def test_every_file_is_on_a_floor_and_every_floor_has_files():
    parts = {part for floor in FLOORS for part in floor}
    names = [below(name) for name in FILES if name.startswith("rlflow")]
    packages = {"rlflow", "scheduler"}

    assert set() == {name for name in names if floor_of(name)[0] is None} - packages
    assert parts == {floor_of(name)[0] for name in names} - {None}


def test_imports_point_down():
    wrong = [
        f"{source} imports {target}"
        for source, target in package_arrows()
        if floor_of(source)[0] != floor_of(target)[0] or floor_of(source)[0] is None
        if floor_of(source)[1] <= floor_of(target)[1]
    ]

    assert [] == wrong


def test_a_part_sees_what_the_table_says():
    used, wrong = set(), []
    for source, target in package_arrows():
        eyes = within(source, SEES)
        if eyes is None or within(target, {eyes, *SEES[eyes]}):
            continue
        beside = [(a, b) for a, b in BESIDES if a == source and within(target, {b})]
        used.update(beside)
        wrong += [] if beside else [f"{source} imports {target}"]

    assert [] == wrong
    assert used == set(BESIDES)


def test_no_file_imports_itself_through_others():
    graph = nx.DiGraph(arrows())

    rings = nx.strongly_connected_components(graph)

    assert [] == [sorted(ring) for ring in rings if len(ring) > 1]


def test_private_names_stay_in_their_folder():
    wrong = []
    for importer, path in FILES.items():
        for name in imported(nodes(path)):
            found = file_of(name, importer)
            words = (name if found is None else f"{found}.{name.rpartition('.')[2]}").split(".")
            private = [word for word in words if word.startswith("_") and word != "__future__"]
            beside = found and FILES[found].parent in (FILES[importer].parent, FILES[importer])
            if found and private and not beside:
                wrong.append(f"{importer} imports {name}")

    assert [] == wrong


def test_inner_imports_of_rlflow_are_at_the_doors():
    inner = {
        below(name)
        for name, path in FILES.items()
        if name.startswith("rlflow")
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for other in imported(ast.walk(node))
        if other.startswith("rlflow")
    }

    assert inner == set(DOORS)


def top_imports(path):
    """The packages that a file imports as it is loaded."""
    return {name.split(".")[0] for name in imported(tree(path).body)}


def test_torch_stays_in_bodies_engines_and_runtime():
    early = {
        name: found
        for name, path in FILES.items()
        if name.startswith("rlflow") and within(below(name), TORCH) is None
        if (found := top_imports(path) & {"torch", "ray", "numpy"})
    }

    assert {} == early


def test_ray_stays_in_its_package():
    outside = {
        name
        for name, path in FILES.items()
        if name.startswith("rlflow") and within(name, {"rlflow.runtime.ray"}) is None
        if "ray" in {other.split(".")[0] for other in imported(nodes(path))}
    }

    assert set() == outside

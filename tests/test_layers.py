"""Imports point one way: the table below is DESIGN's, and nobody imports torch or ray early."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rlflow"

MAY_IMPORT = {
    "errors": set(),
    "batch": {"errors"},
    "data": {"errors"},
    "rewards": {"errors"},
    "envs": {"rewards", "data", "errors"},
    "graph": {"errors"},
    "ops": {"graph", "data", "rewards", "envs", "batch", "errors"},
    "scheduler": {"graph", "errors"},
    "engines": {"graph", "batch", "errors"},
    "runtime": {"scheduler", "engines", "ops", "graph", "data", "batch", "errors"},
    "viz": {"graph", "scheduler", "runtime", "errors"},
    "config": {"graph", "errors"},
    "doctor": {"scheduler", "graph", "interpreters", "errors"},
    "interpreters": {"graph", "errors"},
    "commands": {"config", "scheduler", "graph", "data", "errors"},
    "simulating": {"commands", "scheduler", "viz", "errors"},
    "launch": {"commands", "interpreters", "runtime", "scheduler", "graph", "viz", "errors"},
    "profile": {"commands", "launch", "runtime", "scheduler", "errors"},
    "tuning": {"commands", "scheduler", "graph", "errors"},
    "options": set(),
    "export": {"engines", "graph", "runtime", "scheduler", "errors"},
    "cli": {
        "commands",
        "options",
        "profile",
        "tuning",
        "simulating",
        "launch",
        "doctor",
        "export",
        "viz",
        "scheduler",
        "errors",
    },
    "__init__": {"graph", "ops", "data", "rewards", "envs"},
}
VIZ_READS_OF_RUNTIME = {"spans", "metrics", "rundir", "durable"}
TORCH_FREE = (
    "errors",
    "data",
    "rewards",
    "envs",
    "graph",
    "scheduler",
    "viz",
    "config",
    "commands",
    "simulating",
    "cli",
    "doctor",
    "interpreters",
    "launch",
    "export",
    "__init__",
)
DOORS = {"cli", "commands", "simulating", "launch", "export"}


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree, *, top_only):
    """Dotted names imported by a file; those of TYPE_CHECKING blocks left out."""
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    nodes = tree.body if top_only else ast.walk(tree)
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def edges():
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, _ in imported(ast.parse(path.read_text()), top_only=False):
            parts = name.split(".")
            if parts[0] == "rlflow" and len(parts) > 1:
                yield path, part_of(path), parts[1], parts


def test_packages_import_one_way():
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {'.'.join(parts)}"
        for path, source, target, parts in edges()
        if target != source and target not in MAY_IMPORT[source]
    ]

    assert [] == wrong


def test_viz_reads_files_of_runs_and_nothing_else_of_the_runtime():
    read = {
        parts[2] for _, source, target, parts in edges() if (source, target) == ("viz", "runtime")
    }

    assert read <= VIZ_READS_OF_RUNTIME


def test_torch_stays_in_bodies_engines_and_runtime():
    early = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if part_of(path) not in TORCH_FREE and "ops" != part_of(path):
            continue
        if "bodies" in path.parts or "math" in path.parts:
            continue
        names = [
            name.split(".")[0] for name, _ in imported(ast.parse(path.read_text()), top_only=True)
        ]
        early += [f"{path.name}: {name}" for name in names if name in ("torch", "ray", "numpy")]

    assert [] == early


def test_ray_stays_in_its_package():
    outside = {
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if "on_ray" not in path.relative_to(PACKAGE).parts
        for name, _ in imported(ast.parse(path.read_text()), top_only=False)
        if "ray" == name.split(".")[0]
    }

    assert set() == outside


def test_inner_imports_of_rlflow_are_at_the_doors():
    """Delayed imports of our own packages: only where a command reaches for the heavy ones."""
    inner = {
        part_of(path)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        for name, _ in imported(node, top_only=False)
        if name.startswith("rlflow.")
    }

    assert inner <= DOORS | {"graph", "runtime", "viz"}


def test_declaring_commands_import_neither_torch_nor_ray():
    program = (
        "import sys; from click.testing import CliRunner; from rlflow.cli import cli\n"
        "for words in (['check', P], ['viz', P], ['plan', P], ['diff', P], ['doctor'],\n"
        "              ['simulate', P], ['viz', P, '--level', 'plan', '--format', 'mermaid']):\n"
        "    result = CliRunner().invoke(cli, words)\n"
        "    assert result.exit_code == 0, (words, result.output, result.exception)\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'numpy') if m in sys.modules])\n"
    )
    pipeline = str(ROOT / "pipelines" / "grpo_arithmetic.py")
    done = subprocess.run(
        [sys.executable, "-c", f"P = {pipeline!r}\n{program}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )

    assert "[]" == done.stdout.strip(), done.stderr

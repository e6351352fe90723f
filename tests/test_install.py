"""What a clone and a wheel install: a command that runs, and types that checkers see."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools import find_namespace_packages

from tests.conftest import PIPELINES, ROOT

USER_FILE = """
import rlflow as rf
from rlflow import ops


@rf.pipeline()
def mine(cfg: rf.Config) -> None:
    actor = rf.Model("actor", "x", optimizer=rf.AdamW(lr=1e-4))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=2)
    ops.rollout(actor, prompts, n="two", max_new_tokens=6)
"""


def ran(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command that sees nothing of this repository but what is installed."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    return subprocess.run(
        list(map(str, words)), cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )


def installed(folder: Path, *what: object) -> Path:
    """The programs of a new environment with this package in it; dependencies are those here."""
    venv = folder / "venv"
    ran(sys.executable, "-m", "venv", "--without-pip", venv, cwd=folder)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"])
    pip = (sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "-q", "-I")
    done = ran(*pip, "--no-deps", "--no-build-isolation", *what, cwd=folder)
    assert 0 == done.returncode, done.stderr
    return venv / "bin"


@pytest.mark.slow
def test_a_wheel_runs_in_an_environment_of_its_own(tmp_path):
    wheel = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    built = ran(*wheel, "-w", tmp_path, ROOT, cwd=tmp_path)
    assert 0 == built.returncode, built.stderr
    programs = installed(tmp_path, *tmp_path.glob("*.whl"))
    where = ran(programs / "python", "-c", "import rlflow; print(rlflow.__file__)", cwd=tmp_path)
    assert str(tmp_path) in where.stdout
    done = ran(programs / "rlflow", "check", PIPELINES / "grpo_arithmetic.py", cwd=tmp_path)
    assert 0 == done.returncode, done.stderr
    packed = {str(p.relative_to(programs.parent)) for p in programs.parent.rglob("rlflow/**/*.py")}
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "rlflow").rglob("*.py")}
    assert len(here) == len(packed)


def test_a_wheel_has_every_file_of_the_package_and_no_stand_in_for_another():
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    names = find_namespace_packages(str(ROOT), **said["packages"]["find"])
    packed = {path for name in names for path in (ROOT / name.replace(".", "/")).glob("*.py")}
    for pattern in said["package-data"]["rlflow"]:
        packed |= {path for path in (ROOT / "rlflow").glob(pattern) if path.suffix == ".py"}
    stand_ins = {path.name for path in (ROOT / "scripts" / "sglang_cpu").iterdir()}
    assert {"sgl_kernel", "triton", "sitecustomize.py"} <= stand_ins
    assert [] == [path for path in packed if stand_ins & set(path.relative_to(ROOT).parts)]
    assert set((ROOT / "rlflow").rglob("*.py")) == packed


@pytest.mark.slow
def test_a_type_checker_follows_an_editable_install_from_elsewhere(tmp_path):
    programs = installed(tmp_path, "-e", ROOT)
    (tmp_path / "mine.py").write_text(USER_FILE)
    check = (sys.executable, "-m", "mypy", "--python-executable", programs / "python")
    done = ran(*check, "--cache-dir", tmp_path / "cache", "mine.py", cwd=tmp_path)
    assert 'Argument "n" to "rollout" has incompatible type "str"; expected "int"' in done.stdout
    assert "Found 1 error in 1 file" in done.stdout


def test_the_lowest_versions_are_those_that_are_declared():
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = said["optional-dependencies"]
    declared = [*said["dependencies"], *extras["datasets"], *extras["rewards"], *extras["dev"]]
    bounds = {(bound := Requirement(text)).name: str(bound.specifier) for text in declared}
    pins = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    lowest = {(pin := Requirement(text)).name: pin for text in pins if not text.startswith("#")}

    tools = {"mypy", "pyright", "ruff", "ipykernel", "nbclient"}
    assert lowest.keys() == bounds.keys() - tools, "tools of the house have no pin"
    for name, pin in lowest.items():
        (least,), (exact,) = SpecifierSet(bounds[name]), pin.specifier
        bound = Version(least.version).release
        given = Version(exact.version).release
        assert ">=" == least.operator
        assert bound == given[: len(bound)], name
        assert len(bound) == len(given) or "ortools" == name or not any(given[len(bound) :])


def test_the_demo_ends_with_what_to_type():
    last = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    assert "source $(VENV)/bin/activate" in last.splitlines()[-1]
    assert "$(BIN)/rlflow" in last.splitlines()[-1]


def test_nothing_advises_an_index_that_does_not_have_us():
    files = [*(ROOT / "rlflow").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    assert [] == [str(f) for f in files if "install 'rlflow-engine" in f.read_text()]


def test_every_version_but_torchs_has_hashes():
    """What set-up installs is what was looked at: `make locks` writes them after a change."""
    kept = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    text = (ROOT / "constraints-hashes.txt").read_text()
    blocks = re.findall(
        r"^(\S+==\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.M
    )
    names = [(canonicalize_name(name), version) for name, _, version in map(split_pin, kept)]
    hashed = [
        (canonicalize_name(name), version) for name, _, version in map(split_pin, dict(blocks))
    ]
    assert sorted(pin for pin in names if pin[0] != "torch") == sorted(hashed)
    assert len(dict(blocks)) == text.count("==")


def split_pin(pin: str) -> tuple[str, str, str]:
    return pin.partition("==")

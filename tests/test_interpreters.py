"""What an interpreter is asked about the packages that an engine needs."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest

import rlflow as rf
from rlflow.cli.interpreters import asked, engine_python, missing_engine


def test_packages_are_found_by_their_distribution_or_by_what_python_imports() -> None:
    found = asked(sys.executable, ("numpy", "yaml", "no_such_package"))
    assert {"numpy": version("numpy"), "yaml": version("PyYAML")} == found.packages
    assert ("no_such_package",) == found.missing
    assert "no no_such_package" in found.describe()


@pytest.mark.parametrize("kind", [rf.SGLang, rf.VLLM])
def test_the_interpreter_is_as_said_or_that_of_the_engines_variable(
    kind: type[rf.EngineOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"RLFLOW_{kind.engine.upper()}_PYTHON"
    monkeypatch.delenv(name, raising=False)
    assert sys.executable == engine_python(kind)
    monkeypatch.setenv(name, "/there")
    assert "/there" == engine_python(kind)
    assert "/said" == engine_python(kind, "/said")


def test_what_is_missing_names_the_engine_and_what_to_type() -> None:
    finding = missing_engine(["actor@gen/vllm"], rf.VLLM, "/nowhere/python")
    assert finding is not None
    assert "engine 'vllm' of actor@gen/vllm cannot start: there is no such program" == finding.what
    assert "python= of rf.VLLM, or RLFLOW_VLLM_PYTHON" in str(finding.expected)
    assert "scripts/vllm_cpu.sh" in finding.fix

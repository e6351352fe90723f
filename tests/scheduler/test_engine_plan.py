"""Who asks what an engine is: one file, of one value that is made with its instance."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import pytest

from rlflow.graph.user.engine_options import known_engines
from rlflow.scheduler.plan.engine_plan import EnginePlan
from rlflow.scheduler.plan.instance import engines_of
from tests.scheduler.test_instance import DRAFTER, ENGINE, MESH
from tests.sources import FILES, PACKAGE, nodes

# Engines say themselves what they are; so do the classes of their options, which users write. The
# verifier shares nothing with the passes, not even the words for this.
THEMSELVES = ("engines/", "graph/user/", "scheduler/verify/")
ENGINES = {"options", "inside", "engine"}
DRAFTS = {"drafter", "speculative", "draft_tokens"}


def asked_of(within: Iterable[ast.AST], names: set[str]) -> list[int]:
    """Lines that compare one of the attributes with None, or anything with an engine's name."""
    found = []
    for node in within:
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        attributes = {side.attr for side in sides if isinstance(side, ast.Attribute)}
        values = [side.value for side in sides if isinstance(side, ast.Constant)]
        named = "EMBEDDED" in {side.id for side in sides if isinstance(side, ast.Name)}
        named |= any(value in known_engines() for value in values if isinstance(value, str))
        if (attributes & names and None in values) or (named and "engine" in names):
            found.append(node.lineno)
    return found


def askers(names: set[str]) -> set[str]:
    files = {str(file.relative_to(PACKAGE)): file for file in FILES}
    return {
        name
        for name, file in files.items()
        if not name.startswith(THEMSELVES) and asked_of(nodes(file), names)
    }


def test_a_question_is_found_where_it_is_asked():
    text = "i.options is None\nx != 'sglang'\nEMBEDDED == y\na.b is None\nc.drafter is not None"
    assert asked_of(ast.walk(ast.parse(text)), ENGINES) == [1, 2, 3]
    assert asked_of(ast.walk(ast.parse(text)), DRAFTS) == [5]


def test_one_file_asks_whether_what_generates_is_an_engine():
    # Whether `--engine` was given at all is asked of the command line.
    assert askers(ENGINES) - {"cli/commands.py"} == {"scheduler/plan/engine_plan.py"}


def test_one_file_asks_whether_it_drafts():
    assert askers(DRAFTS) == {"scheduler/plan/engine_plan.py"}


def test_the_embedded_engine_asks_for_nothing():
    embedded = MESH.engine_plan
    assert embedded == EnginePlan()
    assert (embedded.name, embedded.suffix, embedded.told()) == ("torch", "", ())
    asked = (embedded.own_process, embedded.in_process, embedded.drafts, embedded.saves_memory)
    assert asked == (False, False, False, False)
    assert (embedded.verified, embedded.beams, embedded.share_decides) == (0, 0, False)
    with pytest.raises(AssertionError, match="no options"):
        _ = embedded.settings


def test_an_engine_holds_what_drafts_in_it():
    engine, drafter = ENGINE.engine_plan, DRAFTER.engine_plan
    assert (engine.name, engine.suffix, engine.own_process) == ("sglang", "/sglang", True)
    assert (drafter.own_process, drafter.lies_inside, drafter.in_process) == (False, True, True)
    assert engines_of((MESH, ENGINE, DRAFTER)) == (ENGINE,)

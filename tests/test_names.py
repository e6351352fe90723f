"""A public name means one thing: no function or class is defined in two files of rlflow."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.sources import FILES, PACKAGE, tree

# Names that several files may define, each with its reason.
ALLOWED = {
    "main": "what a file does that is started as a program",
}
# An operator has one name: where it is declared, where it runs, and its formula. So has what an
# operator chooses by name, its loss or its estimator.
OPERATOR = {"rlflow.ops": "declaration", "rlflow.ops.bodies": "body", "rlflow.ops.math": "formula"}


def module(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def definitions():
    """The modules that define each public function and class at their top."""
    found = defaultdict(set)
    for path in FILES:
        if "cpu_shims" in path.parts:
            continue
        for node in tree(path).body:
            kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            if isinstance(node, kinds) and not node.name.startswith("_"):
                found[node.name].add(module(path))
    return found


def side(name):
    """What of an operator a module has, by the narrowest folder that it is in; or itself."""
    found = [folder for folder in OPERATOR if name.startswith(f"{folder}.")]
    return OPERATOR[max(found, key=len)] if found else name


def is_one_thing(name, modules):
    """Whether the definitions of a name are sides of one operator."""
    sides = [side(module) for module in modules]
    of_one = len(sides) == len(set(sides)) and set(sides) <= set(OPERATOR.values())
    return name in ALLOWED or of_one


def test_a_public_name_is_defined_once():
    several = {name: modules for name, modules in definitions().items() if len(modules) > 1}

    assert {} == {
        name: sorted(found) for name, found in several.items() if not is_one_thing(name, found)
    }
    assert set(ALLOWED) <= set(several)

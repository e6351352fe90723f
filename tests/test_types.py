"""Types at the doors of modules: `Any` stands for a user's own value, or for a reason given here.

Every parameter, result and field of what is public is looked at, in the syntax tree alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Annotations in which `Any` is no hole: a user's function, plain data by name, shapes of arrays.
FORMS = (
    r"Callable\[\.\.\., Any\]",
    r"(Mapping|dict)\[str, Any\]",
    r"NDArray\[Any\]",
    r"ndarray\[Any, np\.dtype\[np\.\w+\]\]",
)

# By patterns of `file:name(parameter)`: why nothing says more of these.
EXCEPTIONS = {
    r"ctx\)$": "torch has no type for what an autograd function keeps",
    r"^engines/process/server/": "runs among an engine's own classes, in its interpreter",
    r"^engines/hf/.*\((layer|module|body|model|outer|inner)\)$": "a family's own attributes",
    r"^engines/hf/(weights/skeletons:(auto|maker_of)|writing:labelled)": (
        "transformers' classes by name"
    ),
    r"^engines/hf/writing:WrittenForm\.module$": "transformers' classes by name",
    r"^engines/hf/pictures/reader:FamilyReader": "transformers' processors and tokenizers",
    r"^engines/hf/sharded/build:(opaque|HiddenStates)": "a family's own forward",
    r"weights/filling:fill\(stored|shards/reading:StoredTensor": "slices of a safetensors file",
    r"^engines/hf/forward/shares:over_ranks": "torch's types know no ReduceOp",
    r"^engines/hf/(weights/random_weights|generate/waits)": "torch's operators and values",
    r"^runtime/rehearse/": "torch's operators, and a family's own attributes",
    r"^engines/process/client/": "what an engine has answered, plain data",
    r"^runtime/ray/rendezvous": "torch's types know no TCPStore",
    r"^runtime/ray/": "handles of Ray, and lists that it sends",
    r"^scheduler/(memory/exact_joint|periodic/exact):": "OR-Tools, imported where it is asked for",
    r"^data/(arrow|files|hub):": "schemas and tables of pyarrow",
    r"^runtime/record/edges/|^report/(samples/joined|compared/bits):": "tables of pyarrow",
    r"^graph/(fields:|pipeline:|user/iterations:)|^strict:": "a user's annotations and arguments",
    r"^graph/(graph|roles):": "the options of a node, of which a role gives one its meaning",
    r"^ops/": "what a user has given to an op, or gets back in a row",
    r"^rewards/": "values of a user's functions, in this process and in others",
}


def _said(node: ast.expr | None) -> str:
    """An annotation without the forms in which `Any` is no hole."""
    text = ast.unparse(node) if node is not None else ""
    for form in FORMS:
        text = re.sub(form, "known", text)
    return text


def _doors(node: ast.AST, place: str) -> Iterator[tuple[str, str]]:
    """Every public name below a node with its annotation: `file:Class.method(parameter)`."""
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.If | ast.Try):
            yield from _doors(child, place)
        name = getattr(child, "name", None)
        if name is not None and name.startswith("_") and name not in ("__init__", "__call__"):
            continue
        if isinstance(child, ast.ClassDef):
            yield from _doors(child, f"{place}{name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            given = child.args
            for each in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                yield f"{place}{name}({each.arg})", _said(each.annotation)
            yield f"{place}{name}", _said(child.returns)
        elif isinstance(child, ast.AnnAssign) and isinstance(node, ast.ClassDef | ast.Module):
            target = ast.unparse(child.target)
            if not target.startswith("_"):
                yield f"{place}{target}", _said(child.annotation)


@cache
def holes() -> list[str]:
    """The doors that say `Any`, but for the forms above."""
    found = []
    for file in sorted((ROOT / "rlflow").rglob("*.py")):
        place = f"{file.relative_to(ROOT / 'rlflow').as_posix()[:-3]}:"
        doors = _doors(ast.parse(file.read_text()), place)
        found += [name for name, said in doors if re.search(r"\bAny\b", said)]
    return found


def test_any_stands_for_a_users_own_value_or_for_a_reason() -> None:
    unknown = [name for name in holes() if not any(re.search(why, name) for why in EXCEPTIONS)]
    assert [] == unknown


@pytest.mark.parametrize("pattern", EXCEPTIONS)
def test_every_exception_is_needed(pattern: str) -> None:
    assert any(re.search(pattern, name) for name in holes())


def test_a_hole_is_seen_in_parameters_results_and_fields() -> None:
    code = (
        "class A:\n    b: list[Any]\n    _c: Any\n"
        "    def d(self, e: Any, *f: Any, g: dict[str, Any]) -> Any: ...\n"
        "def h(i: Callable[..., Any]) -> Sequence[Any]: ...\n"
        "def _j(k: Any) -> Any: ...\n"
    )
    found = [name for name, said in _doors(ast.parse(code), "") if "Any" in said]
    assert ["A.b", "A.d(e)", "A.d", "h"] == found

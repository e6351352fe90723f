"""Options as type checkers see them: the fields that are checked at run time, written as types.

`RLFLOW_WRITE_DOCS=1 pytest tests/ops/test_option_types.py` writes the files anew.
"""

from __future__ import annotations

import json
import os
import types
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest
from pydantic import BeforeValidator

import rlflow as rf
from rlflow.ops.losses.base import Loss
from rlflow.ops.losses.distill import DistillLoss
from rlflow.ops.losses.preference import DPOLoss, RewardModelLoss
from tests.conftest import ROOT

HEADER = '''"""Options of {whose} as type checkers see them.

{more}
The file is written by tests/ops/test_option_types.py.
"""

from __future__ import annotations

from typing import Literal, {names}
'''
LOSSES = (
    (Loss, (), ()),
    (rf.PolicyLoss, ("kind",), (Loss,)),
    (DistillLoss, ("form",), (rf.PolicyLoss, Loss)),
    (DPOLoss, ("kind",), (Loss,)),
    (RewardModelLoss, ("kind",), (Loss,)),
)
SPECS = (
    (rf.AdaptiveKL, ("target",), ()),
    (rf.AdaptiveEntropy, ("target",), ()),
    (rf.Rejection, ("statistic",), ()),
)
FILES = {
    "rlflow/ops/losses/options.py": (
        "losses",
        "What each one means is said by the field of its name.",
        "\nfrom rlflow.ops.controllers import AdaptiveEntropy, AdaptiveKL\n"
        "from rlflow.ops.corrections import ImportanceSampling, Rejection\n",
        LOSSES,
    ),
    "rlflow/ops/losses/spec_options.py": (
        "controllers and rejections",
        "Bounds are checked at run time.",
        "",
        SPECS,
    ),
}


def spelled(kind, metadata=()):
    """A field's type as it is written, with what a validator takes besides."""
    origin, parts = get_origin(kind), get_args(kind)
    wider = "float | " if any(isinstance(each, BeforeValidator) for each in metadata) else ""
    if origin is Annotated:
        return spelled(parts[0], parts[1:])
    if origin in (Union, types.UnionType):
        return wider + " | ".join(map(spelled, parts))
    if origin is Literal:
        return f"Literal[{', '.join(map(json.dumps, parts))}]"
    if origin is tuple:
        inner = ", ".join("..." if each is Ellipsis else spelled(each) for each in parts)
        return f"{wider}tuple[{inner}]"
    return "None" if kind is type(None) else kind.__name__


def line(name, kind):
    """A field of a TypedDict, broken where it is too long."""
    text = f"    {name}: {kind}"
    if len(text) <= 100:
        return text
    start, _, rest = text.partition("[")
    inner, _, end = rest.rpartition("]")
    return "\n".join(
        [f"{start}[", *(f"        {each}," for each in inner.split(", ")), f"    ]{end}"]
    )


def options(made, positional, bases):
    """The TypedDict of a class's options, but for those of its bases and those said by place."""
    fields = made.model_fields
    others = {name for base in bases for name in base.model_fields} - {"kind"}
    own = [name for name in fields if name not in others and name not in positional]
    kinds = {name: spelled(fields[name].annotation, fields[name].metadata) for name in own}
    needed = {name for name in own if fields[name].is_required()}
    lines = [line(n, f"Required[{kind}]" if n in needed else kind) for n, kind in kinds.items()]
    base = f"{bases[0].__name__}Options" if bases else "TypedDict"
    said = f'    """What `{made.__name__}` takes by name."""'
    return "\n".join([f"class {made.__name__}Options({base}, total=False):", said, "", *lines])


@pytest.mark.parametrize("path", FILES)
def test_options_have_the_types_of_their_fields(path):
    whose, more, imports, classes = FILES[path]
    found = "\n\n\n".join(options(*each) for each in classes)
    names = "Required, TypedDict" if "Required[" in found else "TypedDict"
    text = HEADER.format(whose=whose, more=more, names=names) + imports + "\n\n" + found + "\n"
    if os.environ.get("RLFLOW_WRITE_DOCS"):
        (ROOT / path).write_text(text)

    assert text == (ROOT / path).read_text()

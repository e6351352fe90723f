"""The fields of pictures in prompts: what a model's image processor made of them.

`prompt_pixels` float32 `[token, numbers]` has the pixels of every token that stands for a part of
a picture, in the order of the prompt, and `prompt_pictures` int64 `[picture, 3]` the shape of each
picture as the model counts it. Rows of one prompt have the same. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import replace

from rlflow.errors import Finding
from rlflow.graph.fields import IMAGE, PICTURES, PIXELS, Field, token
from rlflow.graph.model import Model
from rlflow.graph.op import Input, Op
from rlflow.graph.source import declared_at
from rlflow.graph.trace import Handle, report_finding

SEEN = (
    Input(name=PIXELS, dtype="float32", levels=("token",)),
    Input(name=PICTURES, dtype="int64", levels=("token",)),
)
SHAPE_NUMBERS = 3


def pictures_made(model: Model) -> tuple[Field, ...]:
    """The fields that a node of a model makes of pictures."""
    return (
        token(PIXELS, mask=None, seen=model.name),
        token(PICTURES, "int64", mask=None, width=SHAPE_NUMBERS),
    )


def pictures_of(what: str, handles: tuple[Handle, ...], *, drafted: bool = False) -> str:
    """The field of pictures that handles offer, "" for none.

    E118 for several, and where tokens are `drafted`, for a drafter reads text alone.
    """
    offered = {offer.name: offer for handle in handles for offer in handle.offers}
    found = sorted(name for name, offer in offered.items() if offer.field.dtype == IMAGE)
    if not found:
        return ""
    where = declared_at()
    if len(found) > 1:
        many = f"{what} with pictures in {' and '.join(found)}"
        report_finding(Finding(code="E118", what=many, where=where, expected="one such field"))
    if drafted:
        both = f"{what} with pictures and a drafter, which reads text alone"
        report_finding(Finding(code="E118", what=both, where=where, expected="one of them"))
    return found[0]


def no_pictures(what: str, handles: tuple[Handle, ...]) -> None:
    """E118 where handles offer what was made of pictures to an op that reads text alone."""
    if any(offer.name == PIXELS for handle in handles for offer in handle.offers):
        found = f"{what} on rows with pictures"
        expected = "prompts without images=: it reads text alone"
        report_finding(Finding(code="E118", what=found, where=declared_at(), expected=expected))


def seeing(op: Op, model: Model) -> Op:
    """An op that makes the fields of pictures too; a rollout's rows are made in one go."""
    return replace(op, outputs=(*op.outputs, *pictures_made(model)), resumed=None, continued="")


def with_pictures(read: tuple[Input, ...], handles: tuple[Handle, ...]) -> tuple[Input, ...]:
    """What a forward or an update reads, and of pictures what its handles offer."""
    offered = {offer.name for handle in handles for offer in handle.offers}
    return (*read, *SEEN) if PIXELS in offered else read

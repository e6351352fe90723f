"""How things look: the colours, the kinds of nodes, the names of edges, text cut to fit.

Every picture takes its colours from here, so that a model has one colour in all of
them. This file knows plain data (`Graph.to_json()`, `Plan.to_json()`) and no format.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Document = Mapping[str, Any]

# The first three are of Okabe and Ito 2008, told apart by readers with any colour vision. All
# stand out on white and on their own tint; none is near a grey or the yellow of what is inserted.
PALETTE = ("#0072B2", "#C24E00", "#00805C", "#AA4499", "#5D3FA8", "#6B6B00", "#A3123F", "#00788C")
MODEL_TINT = 0.16

INK = "#1F2933"
SOFT_INK = "#52606D"
FAINT = "#7B8794"
LINE = "#CBD2D9"
PAPER = "#FFFFFF"
POOL_FILL = "#F7F9FB"
NO_MODEL = "#7B8794"

FONT = "DejaVu Sans"
SVG_FONT = "DejaVu Sans,Verdana,Helvetica,Arial,sans-serif"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How one kind of node or action is drawn, and its word in the legend; `shape` is DOT's."""

    word: str
    fill: str
    shape: str = "box"
    line: str = NO_MODEL
    ink: str = INK
    borders: int = 1


# Kinds are told by shape and line, models by hue: no fill says the one and the other.
NODE_STYLES: Mapping[str, Style] = {
    "data": Style(word="data", fill="#E4E7EB", shape="cylinder"),
    "rollout": Style(word="rollout", fill="#FFFFFF"),
    "forward": Style(word="forward", fill="#FFFFFF"),
    "host": Style(word="host op", fill="#FFFFFF"),
    "update": Style(word="update: double line", fill="#FFFFFF", borders=2),
    "evaluate": Style(word="evaluate: folded corner", fill="#FFFFFF", shape="note"),
    "loop": Style(word="loop", fill="#F1F5F9", shape="box"),
    "user": Style(word="user's op: tabs", fill="#FFFFFF", shape="component"),
}

ACTION_STYLES: Mapping[str, Style] = {
    "reshard": Style(word="⇄ reshard", fill="#FFE08A", line="#8A6100", borders=2),
    "transfer": Style(word="⇉ transfer", fill="#C9F0EC", shape="folder", line="#1B6E66"),
    "sleep": Style(word="▼ sleep", fill="#3E4C59", shape="box", line="#1F2933", ink="#FFFFFF"),
    "wake": Style(word="▲ wake", fill="#FFFDF0", shape="box", line="#1F2933"),
}

KIND_OF_OP: Mapping[str, str] = {
    "prompts": "data",
    "tokenize": "data",
    "recorded": "data",
    "sink": "data",
    "rollout": "rollout",
    "resume": "rollout",
    "act": "rollout",
    "observe": "host",
    "ended": "host",
    "log_probs": "forward",
    "values": "forward",
    "update": "update",
    "average": "update",
    "evaluate": "evaluate",
    "reward": "host",
    "advantage": "host",
    "metrics": "host",
    "concat": "host",
    "keep": "host",
    "duplicate": "host",
    "split": "host",
    "replay": "data",
    "join": "host",
    "repeat": "loop",
    "gate": "loop",
    "informative": "host",
    "pair": "host",
    "scores": "forward",
    "track": "host",
}


def mode_text(action: Document) -> str:
    """The mode of a plan document's action as all forms print it, with a blank before it."""
    mode = "empty" if (action["kind"], action["mode"]) == ("wake", "discard") else action["mode"]
    return f" ({mode})" if mode else ""


def document_lane(action: Document) -> str:
    """The lane of its devices that a plan document's action occupies, as `Action.lane` says it."""
    return "copy" if action["kind"] in ("sleep", "wake") else "compute"


def kind_of(node: Document) -> str:
    """The kind that a node is drawn as; an op that rlflow does not ship is the user's."""
    return KIND_OF_OP.get(node["op"], "user")


def model_colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for every model, by its place in the declaration."""
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}


def graph_colours(graph: Document) -> dict[str, str]:
    """The colours of a graph document's models."""
    return model_colours(model["name"] for model in graph["models"])


def tint(colour: str, share: float) -> str:
    """A colour thinned with white: `share` of it is left, 0 to 1."""
    parts = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - part)):02X}" for part in parts)


def shorten(text: str, width: int) -> str:
    """Text cut at a word to at most `width` characters, with an ellipsis where it was cut."""
    flat = " ".join(text.split())
    if len(flat) <= width:
        return flat
    cut = flat[: width - 1]
    head, space, _ = cut.rpartition(" ")
    kept = head if space and len(head) > width // 2 else cut
    return kept.rstrip(" ,;:") + "…"


def wrapped(text: str, width: int, lines: int) -> list[str]:
    """Text in at most `lines` lines of `width` characters; the last one says if more was cut."""
    rows = textwrap.wrap(text, width, break_long_words=True, break_on_hyphens=False)
    if len(rows) <= lines:
        return rows
    return [*rows[: lines - 1], shorten(rows[lines - 1] + " " + rows[lines], width)]


def escape(text: str) -> str:
    """Text as it stands in XML, HTML and DOT's HTML-like labels."""
    return html.escape(text, quote=True)


def source_of(reference: str) -> tuple[str, str]:
    """The node and the field of a graph document's `node.field`; nodes' names have dots."""
    node, _, field = reference.rpartition(".")
    return node, field


def references_of(read: str | Iterable[str]) -> list[str]:
    """The `node.field` that an input of a graph document is read of: one, or one of each trip."""
    return [read] if isinstance(read, str) else list(read)


def edge_fields(graph: Document) -> dict[tuple[str, str], tuple[str, ...]]:
    """The fields on every data edge of a graph document, by (source, target), as declared."""
    fields: dict[tuple[str, str], list[str]] = {}
    for node in graph["nodes"]:
        for read in node["inputs"].values():
            for reference in references_of(read):
                source, field = source_of(reference)
                fields.setdefault((source, node["name"]), []).append(field)
    return {pair: tuple(names) for pair, names in fields.items()}


def options_text(node: Document) -> str:
    """A node's options as one line: `n=8, max_new_tokens=12`."""
    return ", ".join(f"{key}={value}" for key, value in node["params"].items())


def listed_names(names: Sequence[str], most: int) -> list[str]:
    """At most `most` names, the last of them a count of those left out."""
    if len(names) <= most:
        return list(names)
    return [*names[: most - 1], f"+{len(names) - most + 1} more"]

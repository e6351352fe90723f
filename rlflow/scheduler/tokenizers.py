"""Whether models that score each other's tokens mean the same by a token, read from files.

Tokens of a response come from one model's tokenizer. Another model may score them, as a teacher,
a reference or a critic does, or be trained on them, if each of those ids is the same text to it.
Files are compared by their bytes first. Knows neither weights nor templates; imports no torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlflow.errors import Finding
from rlflow.graph.check import made_by
from rlflow.graph.graph import Graph, Node
from rlflow.scheduler.known_shapes import PREFIX
from rlflow.scheduler.shapes import model_directory

TOKENIZER = "tokenizer.json"
SHOWN = 3


def tokenizer_findings(graph: Graph, near: Path | None) -> list[Finding]:
    """E270 for every node whose model reads another id differently from the model that sampled.

    Models without files on this machine, or without a `tokenizer.json`, are not compared.
    """
    findings = []
    for node in graph.nodes:
        if node.drafter is not None:
            sampled_by, drafted_by = str(_path(graph, node)), graph.model(node.drafter).path
            differences = differences_of(sampled_by, drafted_by, near)
            shadow = replace(node, model=node.drafter)
            findings += [_finding(shadow, str(node.model), differences)] if differences else []
        sampler, path = _sampler(graph, node), _path(graph, node)
        if sampler is None or path is None or node.op.use == "rollout":
            continue
        name, sampled_by = sampler
        differences = differences_of(sampled_by, path, near)
        if differences:
            findings.append(_finding(node, name, differences))
    return findings


def _sampler(graph: Graph, node: Node) -> tuple[str, str] | None:
    """Whose tokenizer made the responses that a node reads: a name, and the path of a model."""
    for bound in (made_by(graph, each) for each in node.inputs):
        if bound.field.name == "response_tokens":
            source = graph.node(bound.source)
            written = dict(source.params).get("tokenizer")
            if isinstance(written, str):
                return source.name, written
            path = _path(graph, source)
            return None if path is None else (str(source.model), path)
    return None


def _path(graph: Graph, node: Node) -> str | None:
    return None if node.model is None else graph.model(node.model).path


def differences_of(sampled_by: str, scored_by: str, near: Path | None) -> list[str]:
    """Ids of one tokenizer that are other text in the other, each in words; the lowest first."""
    if sampled_by == scored_by or PREFIX in (sampled_by[: len(PREFIX)], scored_by[: len(PREFIX)]):
        return []
    files = [_file(path, near) for path in (sampled_by, scored_by)]
    if files[0] is None or files[1] is None:
        return []
    made, read = (_content(str(file), file.stat().st_mtime_ns) for file in files if file)
    if made.digest == read.digest:
        return []
    return [
        f"token {number} is {text!r}, and {read.tokens.get(number, 'no token')!r} to the other"
        for number, text in sorted(made.tokens.items())
        if read.tokens.get(number) != text
    ]


def _file(path: str, near: Path | None) -> Path | None:
    folder = model_directory(path, near)
    file = None if folder is None else folder / TOKENIZER
    return file if file is not None and file.is_file() else None


class Content:
    """What a tokenizer's file says; its tokens by id are read when they are asked for."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self.digest = hashlib.sha256(text).hexdigest()

    @functools.cached_property
    def tokens(self) -> Mapping[int, str]:
        """The text of every id: the model's vocabulary, and what was added to it."""
        document: dict[str, Any] = json.loads(self._text)
        vocabulary = document.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, dict):
            found = {number: token for token, number in vocabulary.items()}
        else:
            found = {number: entry[0] for number, entry in enumerate(vocabulary)}
        added = {each["id"]: each["content"] for each in document.get("added_tokens", ())}
        return {**found, **added}


@functools.lru_cache(maxsize=8)
def _content(path: str, _changed: int) -> Content:
    """A tokenizer's file, read once as long as it does not change."""
    return Content(Path(path).read_bytes())


def _finding(node: Node, sampler: str, differences: list[str]) -> Finding:
    rest = len(differences) - SHOWN
    shown = [*differences[:SHOWN], *([f"{rest} more"] if rest > 0 else [])]
    return Finding(
        code="E270",
        what=f"{node.name}: model {node.model!r} reads tokens of {sampler!r}, and its tokenizer"
        " is another one",
        where=node.where,
        got="\n".join(shown),
        expected="every token of the one that made the responses, under the same number",
        fix="a model of the same family, whose tokenizer.json has the same vocabulary",
    )

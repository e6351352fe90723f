"""Whether models that score each other's tokens mean the same by a token, read from files.

Tokens of a response come from one model's tokenizer. Another model may score them, as a teacher,
a reference or a critic does, or be trained on them, if each of those ids is the same text to it.
Files are compared by their bytes first. Knows neither weights nor templates; imports no torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlflow.errors import Finding
from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Drafted, Tokenizing
from rlflow.graph.rules.check import makers
from rlflow.modelfiles.directories import model_directory
from rlflow.modelfiles.headers import weight_files
from rlflow.scheduler.models.known_shapes import PREFIX

TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    "tokenizer*.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json", "tokenizer*.py",
)  # fmt: skip
SHOWN = 3


def tokenizer_findings(graph: Graph, near: Path | None) -> list[Finding]:
    """E270 for every node whose model reads another id differently from the model that sampled.

    Models without files on this machine, or without a `tokenizer.json`, are not compared.
    """
    findings = []
    for node in graph.nodes:
        if (drafted := node.role(Drafted)) is not None:
            sampled_by, drafted_by = str(_path(graph, node)), graph.model(drafted.by).path
            differences = differences_of(sampled_by, drafted_by, near)
            shadow = replace(node, model=drafted.by)
            findings += [_finding(shadow, str(node.model), differences)] if differences else []
        path = _path(graph, node)
        if path is None or node.op.use == "rollout":
            continue
        for name, sampled_by in _samplers(graph, node):
            differences = differences_of(sampled_by, path, near)
            if differences:
                findings.append(_finding(node, name, differences))
    return findings


def missing_tokenizers(graph: Graph, near: Path | None) -> list[Finding]:
    """E529 for every node that needs a tokenizer which the directory of its model lacks.

    Directories without weights are not looked at.
    """
    findings = []
    for node in graph.nodes:
        written = written_by(node)
        own = _path(graph, node) if node.op.use == "rollout" else None
        for path in dict.fromkeys(each for each in (own, written) if each is not None):
            if path.startswith(PREFIX):
                continue
            folder = model_directory(path, near)
            if folder is not None and weight_files(folder) and not _has_tokenizer(folder):
                findings.append(_no_tokenizer(node, path))
    return findings


def written_by(node: Node) -> str | None:
    """The path of the model whose tokenizer a node reads text with, if it does."""
    tokenizing = node.role(Tokenizing)
    return None if tokenizing is None else tokenizing.tokenizer


def _has_tokenizer(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES)


def _no_tokenizer(node: Node, path: str) -> Finding:
    return Finding(
        code="E529",
        what=f"{node.name} needs a tokenizer, and {path!r} has none",
        where=node.where,
        got="weights and config.json alone",
        expected="tokenizer.json and tokenizer_config.json beside them",
        fix=f'AutoTokenizer.from_pretrained(BASE_MODEL).save_pretrained("{path}")',
    )


def _samplers(graph: Graph, node: Node) -> Iterator[tuple[str, str]]:
    """Whose tokenizers made the responses that a node reads: names, and paths of models."""
    for bound in (made for each in node.inputs for made in makers(graph, each)):
        if bound.field.name == "response_tokens":
            source = graph.node(bound.source)
            written = written_by(source)
            path = _path(graph, source) if written is None else written
            if path is not None:
                yield str(source.model) if written is None else source.name, path


def _path(graph: Graph, node: Node) -> str | None:
    return None if node.model is None else graph.model(node.model).path


def differences_of(sampled_by: str, scored_by: str, near: Path | None) -> list[str]:
    """Ids of one tokenizer that are other text in the other, each in words; the lowest first."""
    if sampled_by == scored_by or PREFIX in (sampled_by[: len(PREFIX)], scored_by[: len(PREFIX)]):
        return []
    files = [tokenizer_file(path, near) for path in (sampled_by, scored_by)]
    if files[0] is None or files[1] is None:
        return []
    made, read = (tokenizer_content(file) for file in files if file)
    if made.digest == read.digest:
        return []
    return [
        f"token {number} is {text!r}, and {read.tokens.get(number, 'no token')!r} to the other"
        for number, text in sorted(made.tokens.items())
        if read.tokens.get(number) != text
    ]


def tokenizer_file(path: str, near: Path | None) -> Path | None:
    """The `tokenizer.json` of a model whose files are here; None where there is none."""
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


def tokenizer_content(file: Path) -> Content:
    """What a tokenizer's file says, read once as long as it does not change."""
    return _content(str(file), file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _content(path: str, _changed: int) -> Content:
    """The content of a file of which the time of change is known."""
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

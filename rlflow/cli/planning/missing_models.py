"""Models that a pipeline names and that are not where it says, each as an error of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlflow.errors import Finding, UsageError, near_names
from rlflow.graph.graph import Graph
from rlflow.graph.model import Model
from rlflow.modelfiles.directories import cached_models, model_directory
from rlflow.modelfiles.hub import on_the_hub
from rlflow.scheduler.models.known_shapes import PREFIX


def missing_model_findings(graph: Graph, near: Path | None) -> list[Finding]:
    """The models of a graph that are not where it says, each at the line that declares it."""
    findings: list[Finding] = []
    for model in graph.models:
        if model.path.startswith(PREFIX):
            continue
        try:
            model_directory(model.path, near)
        except UsageError as error:
            findings += [replace(finding, where=model.where) for finding in error.findings]
    return findings


def hub_findings(graph: Graph, near: Path | None, *, needed: bool) -> list[Finding]:
    """E528 for models that are not on this machine, and that the hub does not have.

    Where they are `needed` now, also for those that it cannot be asked for.
    """
    findings = []
    wrong = missing_model_findings(graph, near)
    for model in () if wrong else graph.models:
        if model.path.startswith(PREFIX) or model_directory(model.path, near) is not None:
            continue
        answer = on_the_hub(model.path)
        if answer == "missing" or (needed and answer != "there"):
            findings.append(_not_found(model, answer))
    return findings


def _not_found(model: Model, answer: str) -> Finding:
    """A model that is neither here nor to be had."""
    why = {
        "missing": "the hub has no model of that name that may be seen without another HF_TOKEN",
        "unreachable": "the hub does not answer",
        "offline": "HF_HUB_OFFLINE is set, so the hub is not asked",
    }
    fetched = f"hf download {model.path} --local-dir models/{model.path.rpartition('/')[2]}"
    local = f'rf.Model("{model.name}", "models/{model.path.rpartition("/")[2]}", ...)'
    return Finding(
        code="E528",
        what=f"model {model.path!r} is not on this machine",
        where=model.where,
        got=why[answer],
        expected="a directory with config.json, or the name of a hub model",
        near=near_names(model.path, cached_models()),
        fix="" if answer == "missing" else f"{fetched}   with a network, then {local}",
    )

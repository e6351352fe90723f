"""What completes values of options: files, placements of the pipeline, fields of its config, nodes.

Asked for while a line is typed: what goes wrong with a pipeline is left to the command to say.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

from rlflow.cli.config import load_pipeline
from rlflow.graph.pipeline import Pipeline, make_config

Completes = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _of_pipeline(names: Callable[[Pipeline], Iterable[str]]) -> Completes:
    """Completes names that the pipeline, typed before, has."""

    def complete(
        context: click.Context, parameter: click.Parameter, begun: str
    ) -> list[CompletionItem]:
        # An option that waits for its value ends click's reading; what is unread is in `args`.
        typed = context.params.get("pipeline") or next(iter(context.args), "")
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            found = [name for name in names(load_pipeline(typed)) if name.startswith(begun)]
            return [CompletionItem(name) for name in found]
        return []

    return complete


def typed_files(
    context: click.Context, parameter: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Leave it to the shell to complete files."""
    return [CompletionItem(begun, type="file")]


typed_placements = _of_pipeline(lambda pipeline: pipeline.placements)
typed_fields = _of_pipeline(lambda pipeline: [f"{name}=" for name in pipeline.config.model_fields])
typed_nodes = _of_pipeline(
    lambda pipeline: [node.name for node in pipeline.trace(make_config(pipeline.config, ())).nodes]
)

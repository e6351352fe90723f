"""`rlflow rehearse`: a plan, files for models that are known by shape alone, and the table."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlflow.cli.commands import Target, compile_target, costs_of
from rlflow.cli.options import model_shape_option, schedule_options, target_options
from rlflow.cli.rehearsal.stages import as_held_by, rehearsed_devices
from rlflow.cli.shell.printed import json_option, print_json
from rlflow.errors import Finding, PlanError, UsageError
from rlflow.graph.rules.steps import mini_batches
from rlflow.modelfiles.configs import read_config
from rlflow.modelfiles.directories import model_directory
from rlflow.modelfiles.pictures.sights import sight_of
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.lengths import Load
from rlflow.scheduler.devices.cluster import Cluster, amount
from rlflow.scheduler.models.known_shapes import PREFIX, known_widths
from rlflow.scheduler.models.shapes import Shape, model_shape
from rlflow.scheduler.plan.plan import Plan

if TYPE_CHECKING:
    from rlflow.runtime.rehearse.pictures import PicturesAtLongest
    from rlflow.runtime.rehearse.rehearse import Rehearsal
    from rlflow.runtime.rehearse.rows import RowSizes

# Families of the shapes that are known by name, as transformers calls them.
FAMILIES = {"qwen2.5": "qwen2", "qwen3": "qwen3", "llama": "llama", "mistral": "mistral"}
# More rows than so many passes take are of no use: every pass after is like those before. Stages
# have one under way for each of those after them before any comes back; what fills a micro-batch
# may leave half of the rows' tokens.
PASSES = 3
WORD = "<eos>"


@click.command()
@target_options
@schedule_options
@model_shape_option
@json_option
def rehearse(as_json: bool, **options: Any) -> None:
    """Run a plan's training code without data: memory of each action, beside the plan's."""
    plan, found = rehearse_target(Target(**options))
    if as_json:
        print_json(rehearsal_json(found))
    else:
        click.echo(rehearsal_text(plan, found))
    require_agreement(found)


def rehearse_target(target: Target) -> tuple[Plan, list[Rehearsal]]:
    """Compile a placement and rehearse it on a device of each pool, and of stages.

    Raises UsageError for CPU devices, for a model without files whose shape is not given, or one
    of experts.
    """
    planned = compile_target(target)
    plan, near = planned.compiled.plan, planned.declared.pipeline.path
    shapes = {model.name: model_shape(model, near) for model in plan.graph.models}
    require_rehearsable(planned.cluster, shapes)
    costs = costs_of(planned)
    from rlflow.runtime.rehearse.rehearse import rehearse_on

    with tempfile.TemporaryDirectory(prefix="rlflow-rehearse-") as folder:
        models = tuple(
            model.model_copy(update={"path": model_path(model.path, Path(folder), near)})
            for model in plan.graph.models
        )
        plan = replace(plan, graph=replace(plan.graph, models=models))
        sizes = row_sizes(plan, costs)
        vocabulary = max(shape.vocab for shape in shapes.values() if shape is not None)
        own_plans = {own: as_held_by(plan, costs, own) for own in rehearsed_devices(plan)}
        return plan, [rehearse_on(p, own, sizes, vocabulary) for own, p in own_plans.items()]


def require_rehearsable(cluster: Cluster, shapes: Mapping[str, Shape | None]) -> None:
    """Raise UsageError for CPU devices, which compute in ways of their own, and unknown shapes."""
    if cluster.is_cpu:
        raise UsageError(
            Finding(
                code="E256",
                what="CPU devices cannot be rehearsed: accelerators compute in other ways",
                got=cluster.describe(),
                fix="--devices h100:1",
            )
        )
    unknown = [name for name, shape in shapes.items() if shape is None]
    if unknown:
        raise UsageError(
            Finding(
                code="E256",
                what=f"the sizes of {' and '.join(unknown)} are not known",
                got="their files are not on this machine",
                expected="a directory with a config.json, or a public model's shape",
                fix="--model-shape qwen2.5-7b",
            )
        )


def model_path(path: str, folder: Path, near: Path | None = None) -> str:
    """The path of a model; of one that is known by its shape, of files that are made for it."""
    if not path.startswith(PREFIX):
        directory = model_directory(path, near)
        return path if directory is None else str(directory.resolve())
    name = path.removeprefix(PREFIX)
    widths, where = known_widths(name), folder / name
    kind = next((k for start, k in FAMILIES.items() if name.startswith(start)), None)
    kind = "qwen2" if name.startswith("deepseek-r1-distill-qwen") else kind
    kind = "llama" if name.startswith("deepseek-r1-distill-llama") else kind
    if kind is None or widths.experts or widths.latent:
        raise UsageError(
            Finding(
                code="E256",
                what=f"a model of the shape {name} cannot be rehearsed",
                expected=f"a dense one: {', '.join(FAMILIES)}",
                fix="--model-shape qwen2.5-7b",
            )
        )
    where.mkdir(exist_ok=True)
    config = {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "hidden_size": widths.hidden,
        "intermediate_size": widths.ffn,
        "num_hidden_layers": widths.layers,
        "num_attention_heads": widths.heads,
        "num_key_value_heads": widths.kv_heads,
        "head_dim": widths.head_dim,
        "vocab_size": widths.vocab,
        "max_position_embeddings": widths.context,
        "tie_word_embeddings": widths.tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    (where / "config.json").write_text(json.dumps(config))
    _write_tokenizer(where)
    return str(where)


def _write_tokenizer(where: Path) -> None:
    """A tokenizer of one word; no text is read in a rehearsal."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({WORD: 0}, unk_token=WORD))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=WORD).save_pretrained(where)


def row_sizes(plan: Plan, costs: Costs) -> dict[str, RowSizes]:
    """The rows of every run of a model as its plan counts with them, at their longest.

    No more than a few passes of them: an update still makes all of its steps. Where whole rows at
    their longest leave room in a micro-batch, rows are of a length that leaves least: a plan counts
    with micro-batches that are full, as rows of several lengths make them.
    """
    from rlflow.runtime.rehearse.rows import RowSizes

    found = {}
    for action in plan.actions:
        if action.kind != "run" or action.instance is None:
            continue
        node, instance = plan.graph.node(str(action.node)), plan.instance(action.instance)
        if node.op.use not in ("train", "forward"):
            continue
        load = costs.load(node, instance.row_parts)
        chunks = action.chunk.count if action.chunk is not None else 1
        group = max(1, math.ceil(load.rows / load.prompts))
        longest = load.prompt + group * load.lengths.longest
        micro_tokens = instance.micro_tokens * instance.cp
        passes = PASSES if instance.pp == 1 else 2 * (instance.pp + 1)
        enough = math.ceil(passes * max(micro_tokens, load.longest_row) / longest)
        steps = mini_batches(node) if node.op.use == "train" else 1
        prompts = max(1, min(math.ceil(load.prompts / chunks), enough)) * int(max(steps, 1))
        sizes = RowSizes(
            rows=prompts * group,
            prompts=prompts,
            prompt=load.prompt,
            response=load.lengths.longest,
            pictures=_pictures(plan.graph.model(instance.model).path, load),
        )
        found[action.id] = sizes.filling(micro_tokens, steps=int(max(steps, 1)))
    return found


def _pictures(path: str, load: Load) -> PicturesAtLongest | None:
    """The pictures of a prompt that a plan counts with, as the model in a directory sees them."""
    from rlflow.runtime.rehearse.pictures import PicturesAtLongest

    directory = model_directory(path)
    seen = load.pictures
    if seen is None or directory is None or not seen.longest:
        return None
    sight = sight_of(directory, read_config(directory))
    if sight is None:
        return None
    return PicturesAtLongest(sight=sight, count=max(round(seen.count), 1), most=seen.longest)


def rehearsal_text(plan: Plan, found: list[Rehearsal]) -> str:
    """The table: of each action what was planned and found, by kind."""
    lines = [f"{plan.graph.name}   placement {plan.placement} on {plan.cluster}", ""]
    for each in found:
        lines.append(f"device {each.device}, without data: most bytes of an action, planned, found")
        for action in each.actions:
            mark = "" if action.agrees else "   differs"
            lines.append(
                f"  {action.action}   {amount(action.planned)}   {amount(action.found)}   "
                f"{action.difference:+.1%}{mark}"
            )
            for name, kinds in (("planned", action.planned_of), ("found", action.found_of)):
                told = ", ".join(f"{kind} {amount(size)}" for kind, size in kinds if size)
                lines.append(f"    {name}: {told}")
        lines += [f"  not rehearsed: {name}: {why}" for name, why in each.left_out]
    return "\n".join(lines)


def rehearsal_json(found: list[Rehearsal]) -> list[dict[str, Any]]:
    """The same as plain data."""
    return [asdict(each) for each in found]


def require_agreement(found: list[Rehearsal]) -> None:
    """Raise PlanError for actions that take other memory than planned."""
    wrong = [
        Finding(
            code="E407",
            what=f"action {action.action!r} takes other memory than planned",
            got=f"{amount(action.found)}, {action.difference:+.1%}",
            expected=f"{amount(action.planned)}, within 5 % or 64 MiB",
        )
        for each in found
        for action in each.actions
        if not action.agrees
    ]
    if wrong:
        raise PlanError(*wrong)

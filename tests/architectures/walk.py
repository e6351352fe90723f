"""A walk over architectures: what `check` says of each, and what loading and computing do."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rlflow.engines.hf.loading import load_model, quiet_transformers
from rlflow.engines.hf.weights.skeletons import maker_of
from rlflow.errors import PlanError, UsageError
from rlflow.modelfiles.families import family_of
from rlflow.modelfiles.widths import widths_of
from tests.architectures.tiny import UNMADE, tiny_config
from tests.architectures.walking import RUNS, SHAPES, on_ranks, outcome, whole
from tests.engines.ranks import World
from tests.scheduler.test_families import LAYOUTS, STAGES, planned

SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3", "internvl", "llava")


@dataclass(kw_only=True)
class Walked:
    """What was found of one architecture: codes of `check` by layout, and what ran."""

    kind: str
    config: dict = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    ran: dict[str, str] = field(default_factory=dict)
    counted: tuple[int, int] = (0, 0)

    def disagreements(self):
        """Where `check` and what happened differ."""
        if self.said["one"]:
            load = self.ran["forward"]
            return {} if load == self.said["one"] else {"load": load}
        wrong = {}
        for name, what in self.ran.items():
            expected = self.said.get(name, "") or RUNS
            if what != expected:
                wrong[name] = f"{what}, and check says {expected}"
        if self.counted[0] != self.counted[1]:
            wrong["parameters"] = self.counted
        return wrong


def kinds():
    """Every architecture of transformers that it makes a causal language model of, and some more.

    Those take pictures beside a text.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [kind for kind in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *SEEING) if kind not in UNMADE]


def walk(names):
    """What became of each architecture, one after the other."""
    world = None
    for name in names:
        folder = Path(tempfile.mkdtemp())
        try:
            found = look(name, folder)
            if not found.said["one"]:
                world = World(2) if world is None or not world.alive else world
                shared_out(found, world, str(folder / "model"))
                if found.disagreements():
                    # What a rank has sent that gave up would come to the next architecture.
                    world.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        yield found
    if world is not None:
        world.close()


def look(kind, folder):
    """What `check` says, and what one rank does."""
    path = str(folder / "model")
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = tiny_config(kind)
        config.save_pretrained(path)
        saved = json.loads((folder / "model" / "config.json").read_text())
        found = Walked(kind=kind, config=saved)
        found.said = {layout: refusal(path, layout) for layout in (*LAYOUTS, *STAGES)}
    if found.said["one"]:
        load = outcome(load_model, path, dtype=torch.float32, device="cpu", init="random")
        found.ran = {"forward": load}
        return found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = outcome(save_drawn, config, path, found)
        found.ran = whole(path, str(folder / "out")) if made == RUNS else {"forward": made}
    return found


def refusal(path, layout):
    """The code with which a plan is refused, empty where it is not."""
    try:
        planned(path, layout)
    except (PlanError, UsageError) as error:
        return error.findings[0].code
    return ""


def save_drawn(config, path, found):
    """Random weights of a config, written as transformers writes them; their number is noted."""

    torch.manual_seed(0)
    with quiet_transformers():
        made = maker_of(config, "lm").from_config(config, attn_implementation="eager")
        made.save_pretrained(path)
    if family_of(found.config).counted:
        real = sum(parameter.numel() for parameter in made.parameters())
        found.counted = (widths_of(found.config, Path(path)).parameters, real)


def shared_out(found, world, path):
    """What two ranks do, by layout; a plan that is refused only has to be refused."""
    for layout in SHAPES:
        try:
            ran = world.run(on_ranks, path, layout, timeout=120)
        except AssertionError as error:
            ran = [str(error)[-200:]]
        found.ran[layout] = max(ran, key=lambda text: text != RUNS)
        if not world.alive:
            return


def as_json(found):
    """One architecture as a line."""
    return json.dumps(dataclasses.asdict(found))

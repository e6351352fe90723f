"""The documents: every error has its heading, every pipeline traces, every printed plan is real.

`RLFLOW_WRITE_DOCS=1 pytest tests/test_docs.py` writes the printed plans and the pictures anew.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

import rlflow as rf
from rlflow import ops
from rlflow.cli.config import load_pipeline
from rlflow.cli.main import cli
from rlflow.errors import GraphError
from rlflow.scheduler.compile import PASSES, compile_plan
from rlflow.scheduler.devices import cluster
from rlflow.scheduler.passes.rewrite import REWRITES
from rlflow.scheduler.verify.verify import MEANING, SHAPE
from tests.sources import FILES, PACKAGE, ROOT, nodes

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"\bE[1-9]\d\d\b")

# Codes with one meaning that more than one package can find.
SHARED = {
    "E104": {"graph", "ops"},
    "E301": {"cli", "graph"},
    # Lengths of a run are read by the command; words and files by pipelines too.
    "E355": {"cli", "graph"},
    "E357": {"cli", "graph"},
    # The table of architectures says it before a model is loaded, loading of one that is not there.
    "E501": {"engines", "modelfiles"},
    "E515": {"engines", "modelfiles"},
    "E523": {"engines", "modelfiles"},
    "E502": {"engines", "runtime"},
    "E635": {"engines", "scheduler"},
    "E637": {"ops", "scheduler"},
    "E652": {"engines", "runtime"},
    "E714": {"runtime", "report"},
}


NO_VALUES = """import rlflow as rf
from rlflow import ops


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline()
def ppo(cfg: rf.Config) -> None:
    actor = rf.Model("actor", "pipelines/assets/arith-tiny", optimizer=rf.AdamW(lr=1e-4))
    prompts = ops.prompts(rf.data.arithmetic(), batch=64)
    samples = ops.rollout(actor, prompts, max_new_tokens=12)
    reward = ops.reward(exact_match, samples)

    adv = ops.advantage("gae", samples, reward)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss())
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page below `docs/`: its info string, text and first line."""

    page: str
    line: int
    info: str
    text: str


def blocks(*infos: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            name = page.relative_to(DOCS).as_posix()
            found.append(Block(name, line, match["info"], match["text"]))
    return [block for block in found if block.info in infos]


def pictures() -> list[str]:
    """The commands of the pages that write a picture into docs/images."""
    lines = [line for block in blocks("sh") for line in block.text.splitlines()]
    return [line for line in lines if re.search(r" -o docs/images/\w+\.svg$", line)]


def name_of(block: Block) -> str:
    return f"{block.page}:{block.line}"


def headings() -> list[str]:
    return re.findall(r"^### (E\d{3}) \S", (DOCS / "errors.md").read_text(), re.MULTILINE)


def codes_in_the_code() -> dict[str, set[str]]:
    """Every code in a string of the package, docstrings aside, and the packages it is in."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        place = path.relative_to(PACKAGE).parts[0]
        prose = {
            id(node.value)
            for node in nodes(path)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for code in CODE.findall(node.value) if id(node) not in prose else ():
                    found[code].add(place)
    return found


def test_a_code_has_one_heading_and_one_meaning_so_one_package_raises_it():
    found = codes_in_the_code()
    assert sorted(found) == headings()
    assert {code: places for code, places in found.items() if len(places) > 1} == SHARED


def test_the_message_shown_is_a_real_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "pipelines" / "ppo.py"
    file.parent.mkdir()
    file.write_text(NO_VALUES)
    with pytest.raises(GraphError) as raised:
        load_pipeline("pipelines/ppo.py").trace()
    (shown, *_) = [block for block in blocks("") if block.page == "errors.md"]
    assert shown.text == raised.value.render() + "\n"


def test_headings_stand_in_the_section_of_their_number():
    section = ""
    for line in (DOCS / "errors.md").read_text().splitlines():
        if line.startswith("## "):
            section = line[3:7]
        if line.startswith("### E"):
            assert section == f"{line[4:6]}xx"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_plain(page):
    text = page.read_text()
    assert text.isascii()
    assert text.startswith("# ")
    assert text.endswith("\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", BLOCK.sub("", page.read_text()))
    local = [target for target in targets if "://" not in target]
    assert [] == [target for target in local if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_into_pages_name_their_headings(page):
    found = re.findall(r"\]\(([\w./]*)#([\w-]+)\)", BLOCK.sub("", page.read_text()))
    wrong = [
        (target, anchor)
        for target, anchor in found
        if anchor not in anchors(page.parent / target if target else page)
    ]
    assert [] == wrong


def anchors(page: Path) -> set[str]:
    """What links to the headings of a page end in."""
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("block", blocks("python"), ids=name_of)
def test_pipelines_trace_and_compile(block, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    pipeline = load_pipeline(str(written(block, tmp_path)))
    graph = pipeline.trace()
    for name, placement in pipeline.placements.items():
        devices = cluster.cpu_cluster(placement.num_devices(), threads=1, memory=4e9)
        plan = compile_plan(graph, placement, devices, name=name).plan
        assert {a.node for a in plan.actions if a.kind == "run"} == {
            n.name for n in plan.graph.nodes
        }


@pytest.mark.parametrize("op", ops.__all__)
def test_every_option_of_an_op_is_in_its_section(op):
    section = sections()[f"### ops.{op}"]
    options = set(inspect.signature(getattr(ops, op)).parameters) - {"name", "handles", "options"}
    assert set() == {option for option in options if not re.search(rf"\b{option}\b", section)}


@pytest.mark.parametrize(
    "kind",
    [
        rf.PolicyLoss,
        rf.ImportanceSampling,
        rf.Rejection,
        rf.ValueLoss,
        rf.SFTLoss,
        rf.DPOLoss,
        rf.RewardModelLoss,
        rf.DistillLoss,
        rf.Model,
        rf.AdamW,
        rf.Average,
        rf.LoRA,
    ],
)
def test_every_option_of_losses_and_models_is_named(kind):
    text = (DOCS / "pipelines.md").read_text()
    options = set(kind.model_fields) - {"kind", "name", "path", "statistic"}
    assert set() == {option for option in options if not re.search(rf"`[^`]*\b{option}\b", text)}


@pytest.mark.parametrize("kind", [rf.Placement, type(rf.on("pool"))])
def test_every_option_of_placements_is_named(kind):
    text = (DOCS / "placements.md").read_text()
    options = set(kind.model_fields)
    assert set() == {option for option in options if not re.search(rf"`[^`]*\b{option}\b", text)}


@pytest.mark.parametrize("name", cli.commands)
def test_every_command_and_option_is_on_some_page(name):
    text = "\n".join(page.read_text() for page in PAGES)
    options = [option.opts for option in cli.commands[name].params if option.opts[0][0] == "-"]
    assert f"rlflow {name}" in text
    assert [] == [
        words
        for words in options
        if not any(f"{word} " in text or f"{word}`" in text for word in words)
    ]


def sections() -> dict[str, str]:
    """The text below each heading of pipelines.md."""
    parts = re.split(r"^(###? .*)$", (DOCS / "pipelines.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("block", blocks("python fragment"), ids=name_of)
def test_fragments_are_python(block):
    assert ast.parse(block.text).body


@pytest.mark.parametrize("block", blocks("console"), ids=name_of)
def test_consoles_show_what_the_commands_print(block, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cluster, "machine_cores", lambda: 2)
    monkeypatch.setattr(cluster, "machine_memory", lambda: 32e9)
    commands = [line for line in block.text.splitlines() if line.startswith("$ ")]
    shown = "\n".join(f"{command}\n{printed(command)}" for command in commands)
    if os.environ.get("RLFLOW_WRITE_DOCS"):
        page = DOCS / block.page
        before = f"```console\n{block.text}```"
        page.write_text(page.read_text().replace(before, f"```console\n{shown}```"))
    else:
        assert block.text == shown


def commands_to_paste() -> list[str]:
    """The lines of the pages that call rlflow and whose output is not shown."""
    lines = [line for block in blocks("sh") for line in block.text.splitlines()]
    return sorted({line for line in lines if line.startswith("rlflow ")})


@pytest.mark.parametrize("command", commands_to_paste())
def test_lines_to_paste_are_what_the_commands_take(command):
    """Parsed by the command itself, run by nobody."""
    _, name, *words = shlex.split(command.removesuffix("&"), comments=True)
    assert (
        cli.commands[name].make_context(name, words, **cli.context_settings).command
        is cli.commands[name]
    )


@pytest.mark.parametrize("command", pictures(), ids=lambda command: command.split()[-1])
def test_pictures_are_what_the_commands_draw(command, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = ROOT / command.split()[-1]
    if os.environ.get("RLFLOW_WRITE_DOCS"):
        printed(command)
        printed(command.replace(".svg", ".png"))
    made = tmp_path / path.name
    printed(command.replace(str(path.relative_to(ROOT)), str(made)))
    assert path.read_bytes() == made.read_bytes()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    "block", [block for block in blocks("python") if "@rf.op" in block.text], ids=name_of
)
def test_ops_and_losses_of_ones_own_run(block, tmp_path):
    file, run = written(block, tmp_path), tmp_path / "run"
    command = [sys.executable, "-m", "rlflow.cli.main", "run", str(file), "--run-dir", str(run)]
    small = ["--iterations", "1", "--set", "prompts_per_iteration=4", "-q"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *small], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)
    assert "reward/mean" in (run / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.torch
def test_the_engine_of_ones_own_generates_in_pieces(tmp_path):
    (block,) = [block for block in blocks("python") if block.page == "engines.md"]
    file, run = written(block, tmp_path), tmp_path / "run"
    command = [sys.executable, "-m", "rlflow.cli.main", "run", str(file), "--run-dir", str(run)]
    small = ["--iterations", "2", "--check-sync", "--threads", "1", "-q", "--stream", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *small], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line)["metrics"] for line in lines]
    assert 2 == len(found)
    assert all(metrics["actor.update/rollout_gap_max"] < 1e-4 for metrics in found)
    assert "actor@gen/mine" in (run / "plan.json").read_text()


def test_the_design_names_the_passes_and_the_rules():
    text = (DOCS / "design.md").read_text()
    assert [name for name, _ in PASSES] == re.findall(r"^\d+\. `(\w+)` - ", text, re.MULTILINE)
    assert [name for name, _ in REWRITES] == re.findall(r"^- \*([\w ]+)\*: ", text, re.MULTILINE)
    rules = [(rule.__name__, since) for since, rule in (*SHAPE, *MEANING)]
    assert rules == re.findall(r"^\| `(\w+)` \| `(\w+)` \|", text, re.MULTILINE)


def test_the_floors_are_those_that_are_held():
    shown = {head: table(head) for head in ("floor", "part", "file")}
    tree = ast.parse((ROOT / "tests" / "test_layers.py").read_text())
    values = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}
    floors, sees, besides = (
        ast.literal_eval(values[name]) for name in ("FLOORS", "SEES", "BESIDES")
    )

    assert shown["floor"] == [[", ".join(floor)] for floor in floors]
    assert shown["part"] == [[part, ", ".join(sorted(seen))] for part, seen in sees.items()]
    assert shown["file"] == [[*pair, why] for pair, why in besides.items()]


def table(head: str) -> list[list[str]]:
    """The rows of the table of architecture.md whose first column has that head."""
    text = (DOCS / "architecture.md").read_text()
    lines = text.partition(f"\n| {head} |")[2].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def written(block: Block, folder: Path) -> Path:
    file = folder / f"{Path(block.page).stem.replace('-', '_')}_{block.line}.py"
    file.write_text(block.text)
    return file


def printed(command: str) -> str:
    """What a command of a page prints on standard output."""
    program, *words = shlex.split(command.removeprefix("$ "))
    assert program == "rlflow"
    done = CliRunner().invoke(cli, words, prog_name="rlflow", catch_exceptions=False)
    assert 0 == done.exit_code
    return done.stdout

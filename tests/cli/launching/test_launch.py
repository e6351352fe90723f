"""`rlflow launch --dry-run`: what would be submitted, by kind of cluster, and what is refused.

`RLFLOW_GOLDEN=1 pytest` writes the goldens anew.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from rlflow.cli.continuing import LAUNCHED, words_of_run
from rlflow.cli.launching.variables import is_key
from rlflow.cli.options import read_run
from tests.conftest import PIPELINES, TINY

HERE = Path(__file__).parent
TWO = ("--placement", "fsdp", "--devices", "h100:2", "--hosts", "2", "--run-dir", "/shared/mine")
KUBE = ("--k8s", "--image", "reg/rl:1", "--volume", "shared:/shared")
SITES = {
    "slurm.sbatch": ("--slurm", "--partition", "gpu", "--time", "4:00:00", "--env", "A=b c"),
    "rayjob.yaml": (*KUBE, "--namespace", "rl", "--env", "HF_TOKEN", "--secret", "keys"),
    "ssh.sh": ("--ssh", "one,me@two", "--setup", "source /env/bin/activate", "--env", "HF_TOKEN"),
}


def hollow(weights):
    """A safetensors file of zeros: all that a plan reads of it, and small once it is packed."""
    header = 8 + int.from_bytes(weights[:8], "little")
    return weights[:header].ljust(len(weights), b"\0")


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A folder with a pipeline and its model, no git repository, and a variable with a key."""
    assets = tmp_path / "pipelines" / "assets"
    shutil.copytree(TINY, assets / TINY.name)
    shutil.copy(PIPELINES / "grpo_arithmetic.py", assets.parent)
    weights = assets / TINY.name / "model.safetensors"
    weights.write_bytes(hollow(weights.read_bytes()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    return tmp_path


@pytest.fixture
def launch(rlflow):
    """Call it with the words after `rlflow launch PIPELINE`."""
    return lambda *words: rlflow("launch", "pipelines/grpo_arithmetic.py", *words)


def written(project):
    """All files below a folder but what Python compiles of its own accord."""
    return sorted(file for file in project.rglob("*") if "__pycache__" not in file.parts)


def settled(text, project):
    """A text without what differs from machine to machine."""
    text = text.replace(str(project), "/project").replace(version("ray"), "RAY")
    text = text.replace(str(Path(sys.executable).parent), "/env/bin")
    text = re.sub(r"(?<=code.tar.gz: )\S+", "PACKED", text)
    return re.sub(r"(Written by rlflow) \S+:", r"\1:", text)


def parts(text):
    """The documents of a YAML file."""
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("name", SITES)
def test_a_dry_run_prints_what_would_be_submitted_and_writes_nothing(launch, project, name):
    if name.endswith(".yaml"):
        pytest.importorskip("yaml")
    before = written(project)

    found = launch(*SITES[name], *TWO, "--dry-run")

    assert (0, before) == (found.code, written(project))
    golden, text = HERE / "goldens" / name, settled(found.out, project)
    if os.environ.get("RLFLOW_GOLDEN"):
        golden.write_text(text)
    assert golden.read_text() == text
    assert "hf_0123" not in found.out + found.err


@pytest.mark.parametrize("name", SITES)
def test_what_is_written_is_bash(launch, name):
    text = launch(*SITES[name], *TWO, "--dry-run").out
    scripts = [text]
    if name.endswith(".yaml"):
        scripts = [parts(text)[0]["data"]["job.sh"]]
    elif name.endswith(".sh"):
        scripts += re.findall(r"<<'END'\n(.*?)\nEND\n", text, re.DOTALL)
        assert 4 == len(scripts)

    for script in scripts:
        done = subprocess.run(
            ["bash", "-n"], input=script, capture_output=True, text=True, check=False
        )
        assert (0, "") == (done.returncode, done.stderr)


def strict(schema):
    """A schema under which an unknown name is wrong, as it is where a server checks strictly."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        known = schema["properties"].keys() & {"apiVersion", "kind", "metadata"}
        open_ended = "x-kubernetes-preserve-unknown-fields" in schema or schema["properties"] == {}
        if not open_ended and known != {"metadata"}:
            found.setdefault("additionalProperties", False)
    return found


def problems(document):
    """What KubeRay's own schema says against a RayJob."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = strict(json.loads((HERE / "rayjob_schema.json").read_text()))
    errors = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{error.json_path}: {error.message:.200}" for error in errors]


@pytest.mark.parametrize("hosts", ["1", "2"])
def test_the_rayjob_is_one_by_the_schema_of_kuberay(launch, hosts):
    more = ("--time", "1:00:00", "--env", "A=b", "--hosts", hosts)

    text = launch(*SITES["rayjob.yaml"], *TWO, *more, "--dry-run").out

    files, job = parts(text)
    assert ("ConfigMap", "RayJob") == (files["kind"], job["kind"])
    assert ([], 3600) == (problems(job), job["spec"]["activeDeadlineSeconds"])
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["imagee"] = "typo"
    job["spec"]["backoffLimit"] = "many"
    assert 2 == len(problems(job))


def test_the_code_of_a_rayjob_is_in_its_config_map(launch):
    packed = parts(launch(*KUBE, *TWO, "--dry-run").out)[0]["binaryData"]["code.tar.gz"]

    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as tar:
        names = tar.getnames()

    assert "pipelines/grpo_arithmetic.py" in names
    assert f"pipelines/assets/{TINY.name}/config.json" in names


def test_code_that_no_config_map_holds_is_refused(launch, project):
    (project / "large.bin").write_bytes(os.urandom(1_100_000))

    found = launch(*KUBE, *TWO, "--dry-run")

    assert (2, True) == (found.code, "error[E383]" in found.err)
    assert "large.bin (1.1 MB)" in found.err
    assert "binaryData" not in launch(*KUBE, *TWO, "--code-at", "/src", "--dry-run").out


def test_sizes_are_those_of_the_plan(launch):
    found = json.loads(launch("--slurm", *TWO, "--dry-run", "--json").out)
    host = found["host"]

    assert (2, 1, 1, 3) == (host["hosts"], host["devices"], host["gpus"], host["cores"])
    assert host["memory"] == int((host["planned"] + host["processes"]) / 0.8)
    assert found["submitted"] is False
    assert "--gpus-per-node=1" in found["text"]
    assert found["command"][:2] == ["rlflow", "run"]
    said = json.loads(launch("--slurm", *TWO, "--memory", "64GB", "--dry-run", "--json").out)
    assert 64e9 == said["host"]["memory"]


def test_one_host_needs_no_cluster_of_ray(launch):
    words = ("--placement", "split", "--devices", "cpu:2", "--dry-run")

    text = launch("--slurm", *words).out

    assert "--nodes=1\n" in text
    assert "srun" not in text
    assert "--address" not in text


def test_a_run_goes_on_from_its_directory(launch, project):
    run = project / "runs" / "old"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"name": "grpo", "pipeline": "x", "started": "now"}')
    devices = ("--devices", "cpu:2", "--dry-run")

    again = launch("--slurm", *devices, "--resume", run, "--allow-changes", "lr").out
    anew = launch("--slurm", *devices, "--run-dir", run)

    assert f"way=(--resume {run} --allow-changes lr)" in again
    assert (2, True) == (anew.code, "error[E711]" in anew.err and f"--resume {run}" in anew.err)


def test_what_continues_a_launched_run_joins_no_cluster_that_is_gone(launch, monkeypatch):
    program = launch("--ssh", "a,b", *TWO, "--iterations", "9", "--dry-run").out
    (told,) = re.findall(rf"export {LAUNCHED}='(.*)'", program)
    joined = read_run(["p.py", "--backend", "ray", "--address", "10.0.0.1:6379", "--wait", "10m"])

    typed = words_of_run(joined, "x")
    monkeypatch.setenv(LAUNCHED, told)
    launched = words_of_run(joined, "x")

    assert f"launch pipelines/grpo_arithmetic.py {' '.join(TWO[:-2])} --ssh a,b" == told
    assert typed[-4:] == ("--address", "10.0.0.1:6379", "--wait", "600")
    assert typed[:-4] == launched


REFUSED = {
    "no kind": ("E380", ("--devices", "cpu:2")),
    "two kinds": ("E380", ("--slurm", "--k8s", "--devices", "cpu:2")),
    "no devices": ("E380", ("--slurm",)),
    "no host": ("E380", ("--ssh", " ,", "--devices", "cpu:2")),
    "a host twice": ("E380", ("--ssh", "a,b,a", "--devices", "cpu:4")),
    "no command of ssh": ("E380", ("--ssh", "a", "--ssh-command", "'x", "--devices", "cpu:2")),
    "an option of ssh as a host": ("E380", ("--ssh", "-oProxyCommand=x", "--devices", "cpu:2")),
    "an option of another": ("E380", ("--slurm", "--image", "x", "--devices", "cpu:2")),
    "no time": ("E209", ("--slurm", "--time", "banana", "--devices", "cpu:2")),
    "a time without a unit": ("E209", (*KUBE, "--time", "60", "--devices", "cpu:2")),
    "a time of hosts by ssh": ("E380", ("--ssh", "a", "--time", "1h", "--devices", "cpu:2")),
    "restarts by ssh": ("E380", ("--ssh", "a", "--restarts", "0", "--devices", "cpu:2")),
    "no image": ("E380", ("--k8s", "--devices", "cpu:2")),
    "no volume": ("E380", ("--k8s", "--image", "x", "--devices", "cpu:2")),
    "no secret": ("E380", (*KUBE, "--env", "HF_TOKEN", "--devices", "cpu:2")),
    "a run that ends with its pod": ("E380", (*KUBE, "--run-dir", "/x", "--devices", "cpu:2")),
    "too many hosts": ("E381", ("--slurm", "--devices", "cpu:2", "--hosts", "3")),
    "two counts": ("E381", ("--ssh", "a,b", "--hosts", "3", "--devices", "cpu:4")),
    "a key": ("E382", ("--slurm", "--env", "WANDB_API_KEY=abc", "--devices", "cpu:2")),
    "a key to set up": ("E382", ("--slurm", "--setup", "export A_TOKEN=hf_0123456789abcdef")),
    "no variable": ("E386", ("--slurm", "--env", "HF_TOKN", "--devices", "cpu:2")),
    "not below": ("E383", ("--slurm", "--ship", "/etc", "--devices", "cpu:2")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_launched_is_refused_with_a_fix(launch, case):
    code, words = REFUSED[case]

    found = launch(*words, "--dry-run")

    assert (2, "") == (found.code, found.out)
    assert f"error[{code}]" in found.err


def test_models_that_git_ignores_are_not_shipped_unless_they_are_named(launch, project):
    subprocess.run(["git", "init", "-q", project], check=True)
    (project / ".gitignore").write_text("assets/\n")
    words = ("--slurm", "--placement", "split", "--devices", "cpu:2", "--dry-run")

    without = launch(*words)
    named = launch(*words, "--ship", "pipelines/assets")

    assert (2, True) == (without.code, "error[E384]" in without.err)
    assert "--ship pipelines/assets" in without.err
    assert 0 == named.code


@pytest.mark.parametrize("is_git", [True, False])
def test_runs_are_not_shipped_wherever_they_lie(launch, project, is_git):
    if is_git:
        subprocess.run(["git", "init", "-q", project], check=True)
    for folder in ("runs/a", "evals/grpo-2025", "mine", "mine.launch-2/code"):
        (project / folder).mkdir(parents=True)
        (project / folder / ("job.py" if ".launch" in folder else "run.json")).write_text("{}")
    (project / "evals" / "code.py").write_text("")
    words = ("--slurm", "--devices", "cpu:2", "--dry-run", "--json")

    files = [json.loads(launch(*words, *more).out)["files"] for more in ((), ("--ship", "mine"))]

    there = [p for p in written(project) if p.is_file() and ".git" not in p.parts]
    unwanted = ("runs/a/run.json", "evals/grpo-2025/run.json", "mine.launch-2/code/job.py")
    assert [len(there) - len(unwanted) - 1, len(there) - len(unwanted)] == files


def test_nothing_is_submitted_where_nothing_submits(launch, project, monkeypatch):
    monkeypatch.setenv("PATH", "")

    found = launch("--slurm", "--placement", "split", "--devices", "cpu:2")

    assert (2, True) == (found.code, "error[E385]: sbatch is not on this machine" in found.err)
    assert not (project / "runs").exists()


def test_a_script_is_written_and_handed_to_sbatch(launch, project, monkeypatch):
    programs = project / "programs"
    programs.mkdir()
    (programs / "sbatch").write_text(f'#!/bin/sh\necho "$@" > {project}/said\necho "77;cluster"\n')
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    found = launch("--slurm", "--devices", "cpu:2", "--run-dir", "runs/mine")

    beside = project / "runs" / "mine.launch"
    assert (0, "77\n") == (found.code, found.out)
    assert f"--parsable {beside}/job.sbatch\n" == (project / "said").read_text()
    assert (beside / "code" / "pipelines" / "grpo_arithmetic.py").is_file()
    assert f"tail -F {beside}/job-77.log" in found.err


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("HF_TOKEN", "x", True),
        ("NGC_API_KEY", "x", True),
        ("DB_PASSWORD", "x", True),
        ("ANYTHING", "hf_0123456789abcdef", True),
        ("NCCL_DEBUG", "INFO", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("MAX_TOKENS", "8", False),
    ],
)
def test_a_variable_is_a_key_by_its_name_or_its_value(name, value, secret):
    assert is_key(name, value) is secret

"""What a user gets wrong: one message each, the exit code, and nothing started or lost."""

from __future__ import annotations

import errno
import json
import shutil

import pytest

from tests.conftest import TINY

BASE = """\
import rlflow as rf
from rlflow import ops

class Config(rf.Config):
    model: str = "MODEL"
    data: str = "data.jsonl"

def judge(response: str, answer: str) -> float:
    return 1.0

@rf.pipeline()
def mine(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=1e-4))
    prompts = ops.prompts(rf.data.jsonl(cfg.data), batch=2)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=6)
    reward = ops.reward(judge, samples)
    adv = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
"""
ROW = '{"prompt": "1+1=", "answer": "2"}\n'
FILES = ["data.jsonl", "mine.py"]


@pytest.fixture(autouse=True)
def _errors_alone(monkeypatch):
    """What a start says before an error is tested in test_stages."""
    monkeypatch.setattr("rlflow.runtime.record.stages.Stages._say", lambda self, text: None)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with a pipeline and its data, to run commands in."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "mine.py").write_text(BASE.replace("MODEL", str(TINY)))
    (folder / "data.jsonl").write_text(ROW * 4)
    return folder


def rewrite(here, old, new):
    file = here / "mine.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def line_of(here, text):
    """The number of the line of the pipeline file that begins so."""
    lines = (here / "mine.py").read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.strip().startswith(text))


def nothing_started(here):
    names = sorted(path.name for path in here.iterdir() if path.name != "__pycache__")
    return [name for name in FILES if name in names] == names


def test_a_file_that_does_not_import(rlflow, here):
    rewrite(here, "def judge", "import nonexistent_thing\n\ndef judge")
    result = rlflow("run", "mine.py")
    file = here / "mine.py"
    assert 2 == result.code
    assert (
        "error[E307]: mine.py does not import: ModuleNotFoundError: "
        "No module named 'nonexistent_thing'\n"
        "  mine.py:8   import nonexistent_thing\n"
        f'  got            File "{file}", line 8, in <module>\n'
        "                   import nonexistent_thing\n"
    ) == result.err
    assert nothing_started(here)


def test_the_traceback_of_a_file_is_its_own_and_short(rlflow, here):
    (here / "helper.py").write_text("def half(x):\n    return x / 0\n")
    rewrite(here, "def judge", "import helper\nhelper.half(1)\n\ndef judge")
    result = rlflow("check", "mine.py")
    (here / "helper.py").unlink()
    assert 2 == result.code
    assert result.err.startswith(
        "error[E307]: mine.py does not import: ZeroDivisionError: division by zero\n"
        "  mine.py:9   helper.half(1)\n"
    )
    assert "rlflow/cli/config.py" not in result.err
    assert 2 == result.err.count('File "')


def test_a_syntax_error(rlflow, here):
    rewrite(here, "def judge", "x = = 3\n\ndef judge")
    result = rlflow("run", "mine.py")
    assert (
        2,
        "error[E307]: mine.py does not import: SyntaxError: invalid syntax (mine.py, line 8)\n"
        "  mine.py:8   x = = 3\n",
    ) == (result.code, result.err)


def test_a_file_that_exits(rlflow, here):
    rewrite(here, "def judge", "raise SystemExit(0)\n\ndef judge")
    result = rlflow("check", "mine.py")
    assert 2 == result.code
    assert "error[E307]: mine.py does not import: SystemExit: 0\n  mine.py:8" in result.err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("__import__('os')._exit(0)", "SystemExit: os._exit(0)"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise type('Odd', (BaseException,), {})", "Odd"),
        ("raise ValueError('x' * 10**7)", "x... (9,996,000 more letters)"),
    ],
)
def test_a_file_that_raises_what_nobody_catches(rlflow, here, line, said):
    rewrite(here, "def judge", f"{line}\n\ndef judge")
    result = rlflow("check", "mine.py")
    assert 2 == result.code
    assert result.err.startswith("error[E307]: mine.py does not import: ")
    assert f"{said}\n  mine.py:8" in result.err
    assert len(result.err) < 5000


def test_what_the_system_refuses_is_no_bug(rlflow, here, monkeypatch):
    """A name that is too long wherever a file is named; no memory; a full disk under the output."""
    long = "x" * 300
    for words in (
        ("check", f"{long}.py"),
        ("plan", "mine.py", "--placement", f"{long}.py"),
        ("plan", "mine.py", "-o", f"{long}.json"),
        ("plan", "mine.py", "--lengths", f"{long}.json"),
        ("watch", long),
    ):
        result = rlflow(*words)
        assert 2 == result.code, result.err
        assert result.err.startswith(f"error[E705]: cannot reach {long[:100]}: the name is too")

    for error, code in (
        (MemoryError(), "E768"),
        (ImportError("libtorch.so: failed to map segment from shared object"), "E768"),
        (OSError(errno.ENOMEM, "none"), "E768"),
        (OSError("libgomp.so.1: failed to map segment from shared object"), "E768"),
        (RuntimeError("can't start new thread"), "E768"),
        (OSError(errno.ENOSPC, "full"), "E701"),
    ):

        def raises(*arguments, told=error, **options):
            raise told

        monkeypatch.setattr("rlflow.cli.commands.check_all", raises)
        assert f"error[{code}]" in rlflow("check", "mine.py").err


def test_no_room_for_libraries_is_said_before_they_are_loaded(rlflow, here, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (2**30, 2**30))
    result = rlflow("run", "mine.py")
    assert (
        1,
        "error[E768]: this process may map too little memory for the libraries of a run\n"
        "  got          1,024 MiB of addresses (ulimit -v 1048576)\n"
        "  expected     1,600 MiB at least\n"
        "  fix          ulimit -v unlimited\n",
    ) == (result.code, result.err)


def test_a_working_directory_that_is_gone(rlflow, here, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    file = here / "mine.py"
    monkeypatch.chdir(gone)
    gone.rmdir()
    result = rlflow("check", file)
    assert 2 == result.code
    assert result.err.startswith("error[E705]: the working directory is not there any more\n")


def test_no_pipeline(rlflow, here):
    rewrite(here, "@rf.pipeline()\n", "")
    result = rlflow("run", "mine.py")
    assert (
        2,
        "error[E306]: mine.py has no pipeline\n"
        "  expected     one function decorated with @rf.pipeline\n"
        "  fix          @rf.pipeline()\n"
        "               def my_pipeline(cfg: rf.Config): ...\n",
    ) == (result.code, result.err)


def test_two_pipelines(rlflow, here):
    rewrite(here, "@rf.pipeline()", "@rf.pipeline()\ndef other(cfg: Config): ...\n\n@rf.pipeline()")
    result = rlflow("run", "mine.py")
    assert (
        2,
        "error[E306]: mine.py has 2 pipelines: other, mine\n"
        "  expected     the name of one of them\n"
        "  fix          mine.py:other\n",
    ) == (result.code, result.err)
    assert 0 == rlflow("check", "mine.py:mine").code
    result = rlflow("check", "mine.py:mien")
    assert 2 == result.code
    assert "did you mean 'mine'" in result.err


def test_no_such_file(rlflow, here):
    result = rlflow("run", "nime.py")
    assert 2 == result.code
    assert "error[E306]: there is no file nime.py\n" in result.err
    assert "did you mean 'mine.py'" in result.err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "modle=x",
            "error[E304]: --set modle: the config Config has no field 'modle'\n"
            "  expected     seed, iterations, model, data\n"
            "  did you mean 'model'\n",
        ),
        (
            "iterations=many",
            "error[E305]: --set iterations: Input should be a valid integer, unable to parse "
            "string as an integer\n  got          'many'\n",
        ),
        (
            "iterations=0",
            "error[E305]: --set iterations: Input should be greater than or equal to 1\n"
            "  got          0\n",
        ),
        ("model", "error[E303]: --set 'model' has no '='\n  fix          --set key=value\n"),
    ],
)
def test_a_setting_that_is_wrong(rlflow, here, setting, message):
    for command in ("run", "plan", "check", "viz"):
        result = rlflow(command, "mine.py", "--set", setting)
        assert (2, message) == (result.code, result.err)
    assert nothing_started(here)


def test_an_unknown_placement(rlflow, here):
    result = rlflow("run", "mine.py", "--placement", "colocated")
    assert (
        2,
        "error[E201]: pipeline 'mine' has no placement 'colocated'\n"
        f"  mine.py:{line_of(here, '@rf.pipeline')}   def mine(...)\n"
        "  expected     colocate\n"
        "  did you mean 'colocate'\n",
    ) == (result.code, result.err)
    assert nothing_started(here)


PLACED = """@rf.pipeline(
    placements={
        "one": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "four": rf.Placement(pools={"all": 4}, assign={"*": rf.on("all")}),
    }
)"""


@pytest.mark.parametrize("command", ["run", "plan", "check"])
def test_a_placement_larger_than_the_cluster(rlflow, here, command):
    rewrite(here, "@rf.pipeline()", PLACED)
    result = rlflow(command, "mine.py", "--placement", "four", "--devices", "cpu:2@4GB")
    assert 4 == result.code
    assert result.err.startswith(
        "error[E203]: placement 'four' needs 4 devices, there are 2\n"
        "  got          pools: all [0:4]\n"
    )
    assert "  fix          --devices cpu:4\n" in result.err
    assert nothing_started(here)


def test_more_cpu_devices_than_cores_share_them(rlflow, here, monkeypatch):
    rewrite(here, "@rf.pipeline()", PLACED)
    rewrite(here, "batch=2", "batch=4")
    monkeypatch.setattr("rlflow.scheduler.devices.cluster.machine_cores", lambda: 2)
    for words in (("--devices", "cpu:4"), ()):
        result = rlflow("plan", "mine.py", "--placement", "four", *words)
        assert 0 == result.code, result.err
        assert "1 thread each" in result.out
        assert "  shared cores: 4 CPU devices share 2 cores\n" in result.out
    assert "shared cores" not in rlflow("plan", "mine.py", "--devices", "cpu:2").out


@pytest.mark.parametrize("command", ["run", "plan", "check"])
def test_fewer_samples_than_ranks(rlflow, here, command):
    rewrite(here, "@rf.pipeline()", PLACED)
    rewrite(here, "batch=2", "batch=1")
    result = rlflow(command, "mine.py", "--placement", "four")
    assert 4 == result.code
    assert "error[E214]: actor.rollout: 2 rows do not split over 4 ranks\n" in result.err
    assert nothing_started(here)


@pytest.mark.parametrize("command", ["run", "plan", "check"])
def test_a_dispatch_that_nobody_registered(rlflow, here, command):
    own = '@rf.op(per="row", dispatch="firts")\ndef half(reward: rf.Row[float]) -> rf.Row[float]:'
    rewrite(here, "@rf.pipeline()", f"{own}\n    return reward\n\n@rf.pipeline()")
    rewrite(here, "    adv =", "    ops.metrics(half(reward))\n    adv =")
    result = rlflow(command, "mine.py")
    assert 4 == result.code
    assert result.err.startswith("error[E219]: half: no dispatch 'firts' is registered\n")
    assert "  did you mean 'first' or " in result.err
    assert nothing_started(here)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (
            "gpu",
            "error[E202]: --devices 'gpu' is not a cluster\n"
            "  expected     kind:count or kind:count@memory\n"
            "  fix          --devices cpu:2@4GB\n",
        ),
        ("cpu:0", "error[E202]: --devices 'cpu:0' has no device\n"),
        (
            "h10:8",
            "error[E202]: --devices 'h10:8': no device kind 'h10' is known\n"
            "  expected     cpu, a100, a800, h100, h800, h20, h200, b200, gb200, l40s, "
            "rtx4090, mi300x\n"
            "  did you mean 'h100' or 'h20'\n",
        ),
    ],
)
def test_devices_that_are_not_a_cluster(rlflow, here, devices, message):
    result = rlflow("run", "mine.py", "--devices", devices)
    assert (2, message) == (result.code, result.err)


@pytest.mark.parametrize("command", ["run", "plan", "check"])
@pytest.mark.parametrize(
    ("words", "got"),
    [
        (("--devices", "h100:4"), "the devices are h100, pool 'all' has 4 devices"),
        ((), "pool 'all' has 4 devices"),
    ],
)
def test_devices_that_this_process_cannot_run(rlflow, here, command, words, got):
    rewrite(here, "@rf.pipeline()", PLACED)
    result = rlflow(command, "mine.py", "--placement", "four", *words, "--backend", "local")
    assert 4 == result.code
    assert (
        "error[E403]: the local backend runs one accelerator, or CPU pools of one device each\n"
        f"  got          {got}\n"
        "  expected     one accelerator, one CPU device a pool, or a process for every device\n"
        "  fix          --backend ray\n"
    ) == result.err
    assert nothing_started(here)


@pytest.mark.torch
def test_an_accelerator_that_is_not_there(rlflow, here, monkeypatch):
    """A plan for one needs no process beside this one; a run needs the device."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rewrite(here, "@rf.pipeline()", PLACED)
    words = ("mine.py", "--placement", "one", "--devices", "h100:1")
    assert "backend ray" not in rlflow("plan", *words).out
    result = rlflow("run", *words)
    assert 4 == result.code
    assert "error[E406]: this process has no device of kind 'h100'" in result.err
    assert nothing_started(here)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_deadline_that_is_no_time(rlflow, here, seconds):
    result = rlflow("run", "mine.py", f"--deadline={seconds}")
    assert 2 == result.code
    assert result.err.startswith(f"error[E209]: --deadline {seconds} is not a time to wait\n")
    assert nothing_started(here)


@pytest.mark.parametrize("command", ["run", "plan", "check"])
def test_a_model_path_that_is_not_there(rlflow, here, command):
    result = rlflow(command, "mine.py", "--set", "model=./nowhere")
    line = line_of(here, "actor =")
    assert 2 == result.code
    assert result.err.startswith(
        "error[E204]: there is no model at './nowhere'\n"
        f'  mine.py:{line}   actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=1e-4))\n'
    )
    assert result.err.endswith("Nothing was started.\n")
    assert nothing_started(here)


@pytest.mark.parametrize("command", ["run", "plan", "check"])
def test_a_data_file_with_a_broken_line(rlflow, here, command):
    (here / "data.jsonl").write_text(ROW + '{"prompt": \n' + ROW)
    result = rlflow(command, "mine.py")
    assert (
        2,
        "error[E602]: line 2 of data.jsonl is not a JSON object\n"
        '  data.jsonl:2   {"prompt":\n'
        "  got          Expecting value at column 11\n"
        "  expected     one JSON object on each line\n"
        "Nothing was started.\n",
    ) == (result.code, result.err)
    assert nothing_started(here)


def test_a_data_file_that_is_not_there(rlflow, here):
    result = rlflow("run", "mine.py", "--set", "data=date.jsonl")
    assert 2 == result.code
    line = line_of(here, "prompts =")
    assert "error[E601]: no file 'date.jsonl'\n" in result.err
    assert f"  mine.py:{line}   prompts = " in result.err
    assert "did you mean 'data.jsonl'" in result.err


def test_a_plan_that_does_not_fit(rlflow, here):
    result = rlflow("run", "mine.py", "--devices", "cpu:1@5MB")
    line = line_of(here, "ops.update")
    assert 4 == result.code
    assert result.err.startswith(
        "error[E401]: action 'actor.update' does not fit on all[0]\n"
        f"  mine.py:{line}   ops.update(actor, samples, adv, "
    )
    assert "  expected     at most 5.0 MB, the memory of the device\n" in result.err
    assert nothing_started(here)


def test_a_pipeline_that_raises(rlflow, here):
    rewrite(here, "    actor =", "    cfg.nothing\n    actor =")
    result = rlflow("check", "mine.py")
    assert 3 == result.code
    assert result.err.startswith("error[E308]: pipeline 'mine' raised AttributeError: ")
    assert f"  mine.py:{line_of(here, 'cfg.nothing')}   cfg.nothing\n" in result.err


def test_a_graph_with_two_mistakes_has_two_findings(rlflow, here):
    rewrite(here, "samples, adv, loss", "samples, loss")
    rewrite(here, '"ppo_clip")', '"ppo_clip", kl_coef=0.1)')
    result = rlflow("run", "mine.py")
    assert 3 == result.code
    line = line_of(here, "ops.update")
    for field in ("advantages", "ref_log_probs"):
        assert f"error[E103]: node 'actor.update' has no input '{field}'\n" in result.err
    assert 2 == result.err.count(f"  mine.py:{line}   ops.update(")
    assert result.err.endswith("2 errors in mine.py. Nothing was started.\n")


@pytest.mark.torch
@pytest.mark.parametrize("dry", [(), ("-n",)])
def test_a_tokenizer_without_eos(rlflow, here, tmp_path, dry):
    model = shutil.copytree(TINY, tmp_path / "noeos")
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": None}))
    result = rlflow("run", "mine.py", "--set", f"model={model}", *dry)
    assert 2 == result.code
    assert f"error[E502]: the tokenizer of '{model}' has no EOS token" in result.err
    assert nothing_started(here)


@pytest.mark.torch
def test_an_eos_that_the_model_cannot_make(rlflow, here, tmp_path):
    model = shutil.copytree(TINY, tmp_path / "othereos")
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<end>"}))
    result = rlflow("run", "mine.py", "--set", f"model={model}")
    assert 2 == result.code
    assert "error[E502]: the EOS token of actor@all's tokenizer, '<end>', is unknown" in result.err
    assert nothing_started(here)


@pytest.mark.torch
@pytest.mark.parametrize("dry", [(), ("-n",)])
def test_a_prompt_longer_than_the_context(rlflow, here, dry):
    long = json.dumps({"prompt": "1" * 400, "answer": "2"})
    (here / "data.jsonl").write_text(ROW + long + "\n")
    result = rlflow("run", "mine.py", *dry)
    line = line_of(here, "samples =")
    assert 2 == result.code
    assert result.err.startswith(
        "error[E631]: actor.rollout: a prompt is longer than the context allows\n"
        f"  mine.py:{line}   samples = ops.rollout(actor, prompts, n=2, max_new_tokens=6)\n"
        "  got          400 prompt tokens + 6 new tokens, in row 1: '1111"
    )
    assert result.err.endswith("Nothing was started.\n")
    assert nothing_started(here)


@pytest.mark.rows(2)
@pytest.mark.torch
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return 1 / 0", "on sample 0 of iteration 0: ZeroDivisionError: division by zero"),
        ('return float("nan")', "on sample 0 of iteration 0: returned nan"),
        ("return None", "on sample 0 of iteration 0: returned None"),
        ('return "1"', "on sample 0 of iteration 0: returned '1'"),
    ],
)
def test_a_reward_that_breaks_names_its_sample(rlflow, here, body, problem):
    rewrite(here, "return 1.0", body)
    result = rlflow("run", "mine.py", "--run-dir", "made", "-q")
    line = line_of(here, "reward =")
    assert 1 == result.code
    assert result.err.startswith(
        f"error[E640]: reward judge {problem}\n"
        f"  mine.py:{line}   reward = ops.reward(judge, samples)\n"
        "  got          response: "
    )
    assert "               answer: '2'\n" in result.err
    assert "\ntraceback: made/logs/error.txt\ncontinue with: rlflow run mine.py " in result.err
    assert "judge" in (here / "made" / "logs" / "error.txt").read_text()


@pytest.mark.torch
def test_a_batch_reward_of_the_wrong_length(rlflow, here):
    rewrite(here, "response: str, answer: str) -> float", "response: list[str]) -> list[float]")
    rewrite(here, "return 1.0", "return [1.0]")
    result = rlflow("run", "mine.py", "--run-dir", "made", "-q")
    assert 1 == result.code
    assert result.err.startswith("error[E640]: reward judge: 1 rewards for 4 samples\n")


@pytest.mark.torch
def test_a_run_directory_is_never_written_over(rlflow, here):
    words = ("run", "mine.py", "--iterations", 1, "-q", "--run-dir")
    assert 0 == rlflow(*words, "made").code
    before = {path: path.read_bytes() for path in (here / "made").rglob("*") if path.is_file()}
    result = rlflow(*words, "made")
    assert 2 == result.code
    assert "error[E711]: made holds a run of mine, started " in result.err
    assert "rlflow run mine.py --placement colocate --quiet --resume made\n" in result.err
    after = {path: path.read_bytes() for path in (here / "made").rglob("*") if path.is_file()}
    assert before == after
    (here / "junk").mkdir()
    (here / "junk" / "x").touch()
    result = rlflow(*words, "junk")
    assert 2 == result.code
    assert "error[E712]: junk holds other files and no run\n" in result.err
    assert ["x"] == [path.name for path in (here / "junk").iterdir()]


@pytest.mark.torch
def test_a_run_directory_in_use(rlflow, here):
    from rlflow.runtime.record.rundir import RunDir

    words = ("run", "mine.py", "--iterations", 1, "-q")
    assert 0 == rlflow(*words, "--run-dir", "made").code
    with RunDir.open(here / "made"):
        result = rlflow(*words, "--resume", "made")
        assert 2 == result.code
        assert "error[E710]: the run directory made is in use by pid " in result.err
    assert 0 == rlflow(*words, "--resume", "made").code


def test_nothing_to_resume(rlflow, here):
    result = rlflow("run", "mine.py", "--resume", "nothing")
    assert 2 == result.code
    assert "error[E712]: nothing is not a run directory\n" in result.err
    result = rlflow("run", "mine.py", "--resume")
    assert 2 == result.code
    assert "error[E713]: no run of mine.py in runs to continue\n" in result.err
    assert nothing_started(here)

"""`rlflow launch` to its end without a cluster: two hosts in network namespaces of this machine.

Slurm's programs are stood for by scripts of `fake_slurm`; bash, Ray, ssh and the run are real.
Everything runs in namespaces of mounts, network and processes, and is gone with them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PIPELINES, ROOT, TINY

HERE = Path(__file__).parent
SPACES = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
NODES = HERE / "two_hosts.sh"
SSHD = "/usr/sbin/sshd"
RUN = ("--placement", "fsdp", "--devices", "cpu:2", "--set", "prompts_per_iteration=4")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extra, pytest.mark.timeout(600)]


@pytest.fixture
def project(tmp_path):
    """A folder with a pipeline and its model; skips where no namespaces can be made."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("no ip and unshare")
    tried = subprocess.run(
        [*SPACES, NODES, tmp_path, "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"no network namespaces: {tried.stderr.strip()[-200:]}")
    shutil.copytree(TINY, tmp_path / "pipelines" / "assets" / TINY.name)
    shutil.copy(PIPELINES / "grpo_arithmetic.py", tmp_path / "pipelines")
    return tmp_path


def beside_two_hosts(project, script, **environment):
    """Run a script of bash beside two hosts; what it printed, and its errors."""
    programs = Path(sys.executable).parent
    settings = {
        **os.environ,
        "PATH": f"{HERE / 'fake_slurm'}:{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ON_NODE": str(HERE / "on_node.sh"),
        "FAKE_SLURM": str(project),
        "RLFLOW": f"{sys.executable} -m rlflow.cli.main",
        "PYTHON_BIN": str(programs),
        **environment,
    }
    return subprocess.run(
        [*SPACES, NODES, project, "bash", "-euc", script],
        cwd=project,
        env=settings,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )


def iterations(run):
    """The iterations of a run's metrics, in the order in which they were written."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["iteration"] for line in lines]


def test_a_job_of_slurm_is_put_back_and_goes_on(project):
    """Warned after its first iterations it saves, is queued again, and ends as if nothing was."""
    script = f"""
    $RLFLOW launch pipelines/grpo_arithmetic.py --slurm --hosts 2 {" ".join(RUN)} \
      --iterations 12 --save-every 50 --run-dir run
    for turn in $(seq 250); do [ -s run/metrics.jsonl ] && break; sleep 1; done
    kill -USR1 "$(cat batch)"
    for turn in $(seq 250); do [ -e ended ] && break; sleep 1; done
    """

    done = beside_two_hosts(project, script)

    log = (project / "run.launch" / "job-4242.log").read_text()
    assert 0 == done.returncode, done.stderr
    assert "0 after 1 restarts\n" == (project / "ended").read_text(), log
    assert "resuming after iteration" in log
    assert list(range(12)) == iterations(project / "run")[:12]
    assert "node0" in log
    assert "node1" in log


@pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd")
def test_a_run_by_ssh_ends_with_nothing_left_on_its_hosts(project):
    script = f"""
    mkdir -p /run/sshd ssh
    ssh-keygen -q -t ed25519 -N '' -f ssh/key
    ssh-keygen -q -t ed25519 -N '' -f ssh/host
    printf '%s\\n' "HostKey $PWD/ssh/host" "AuthorizedKeysFile $PWD/ssh/key.pub" \
      'StrictModes no' 'UsePAM no' 'PidFile none' > ssh/config
    for node in 0 1; do "$ON_NODE" $node {SSHD} -D -e -f "$PWD/ssh/config" 2> ssh/log$node & done
    sleep 2
    enter="ssh -i $PWD/ssh/key -o BatchMode=yes -o StrictHostKeyChecking=no"
    enter="$enter -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    $RLFLOW launch pipelines/grpo_arithmetic.py --ssh 10.77.0.1,10.77.0.2 --ssh-command "$enter" \
      {" ".join(RUN)} --iterations 3 --run-dir run --env SOME_TOKEN --env PYTHONPATH="$PYTHONPATH" \
      > printed
    pgrep -x 'raylet|gcs_server|sleep' > left || true
    """

    done = beside_two_hosts(project, script, SOME_TOKEN="not-to-be-written")

    assert 0 == done.returncode, done.stderr
    assert [0, 1, 2] == iterations(project / "run")[:3]
    assert "3 iterations" in (project / "printed").read_text()
    assert "10.77.0.2" in (project / "run" / "plan.txt").read_text()
    assert "" == (project / "left").read_text()
    files = [path for path in project.rglob("*") if path.is_file()]
    assert [] == [path for path in files if b"not-to-be-written" in path.read_bytes()]

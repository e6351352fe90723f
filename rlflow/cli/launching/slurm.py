"""A launched run as a batch script of Slurm: Ray's nodes by srun, the run on the first host.

`ray symmetric-run` is not used: it stops every Ray of the user on a host, and passes no signal on.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from rlflow.cli.launching.job import FIND_ADDRESS, LaunchJob
from rlflow.scheduler.plan.durations import clock_text

# Slurm sends this before it takes the hosts away; SIGTERM is what `scancel` sends.
WARNING = "USR1"
STOPPED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSite:
    """What only a user knows of a cluster of Slurm; `srun` are more words for every srun."""

    partition: str | None = None
    account: str | None = None
    srun: str = ""


def batch_script(job: LaunchJob, site: SlurmSite) -> str:
    """The script for sbatch; it ends with the run's exit code, or puts itself back in the queue."""
    several = job.need.hosts > 1
    lines = [
        "#!/bin/bash",
        *job.described(),
        *_directives(job, site),
        "set -euo pipefail",
        "",
        *job.environment(),
        "",
        *(_cluster(job, site) if several else []),
        "# A run that has begun goes on, after its newest checkpoint.",
        *job.chosen(),
        "",
        *_signals(job),
        "",
        f"{job.command(chr(34) + '$address:$port' + chr(34) if several else '')} &",
        *_end(job),
    ]
    return "\n".join(lines) + "\n"


def _directives(job: LaunchJob, site: SlurmSite) -> list[str]:
    need = job.need
    said = {
        "job-name": job.name,
        "partition": site.partition,
        "account": site.account,
        "time": None if job.time is None else clock_text(job.time),
        "nodes": need.hosts,
        "ntasks-per-node": 1,
        "gpus-per-node": need.gpus or None,
        "cpus-per-task": need.cores,
        # A limit: all of a server whose GPUs are all taken, of another no less than its share.
        "mem": "0" if need.whole else f"{need.most_gibibytes}G",
        "output": f"{job.beside}/job-%j.log",
        "open-mode": "append",
        "export": "ALL",
        "signal": f"B:{WARNING}@{need.grace}",
    }
    named = [f"#SBATCH --{name}={value}" for name, value in said.items() if value is not None]
    return [*named, "#SBATCH --requeue", *job.raw]


def _cluster(job: LaunchJob, site: SlurmSite) -> list[str]:
    """Ray's head on this host, the first, and a worker on each other, as one step of the job."""
    need = job.need
    head = job.ray_start(
        '--head --node-ip-address="$address" --port="$port"',
        '--include-dashboard=false --ray-client-server-port="$client" --temp-dir="$scratch"',
    )
    worker = job.ray_start('--address="$address:$port"')
    words = f"--nodes={need.hosts} --ntasks={need.hosts} --ntasks-per-node=1"
    step = f"srun {words} --cpus-per-task={need.cores} --kill-on-bad-exit=1"
    return [
        "# Ray: its head on this host, a worker on each other. The key to it is written nowhere.",
        FIND_ADDRESS,
        "port=$((20000 + SLURM_JOB_ID % 20000))",
        "client=$((port + 1))",
        'scratch="/tmp/ray-$SLURM_JOB_ID"',
        "RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \\n')",
        "export address port client scratch RAY_AUTH_TOKEN RAY_AUTH_MODE=token",
        "node='",
        'if [ "$SLURM_NODEID" = 0 ]; then',
        f"  exec {head}",
        "fi",
        'until (exec 3<> "/dev/tcp/$address/$port") 2> /dev/null; do sleep 1; done',
        f"exec {worker}",
        "'",
        f'{" ".join(filter(None, [step, site.srun]))} bash -c "$node" '
        f'> {shlex.quote(job.beside)}/ray-"$SLURM_JOB_ID".log 2>&1 &',
        "nodes=$!",
        'trap \'{ kill "$nodes"; wait "$nodes"; } 2> /dev/null || true; rm -rf "$scratch"\' EXIT',
        "",
    ]


def _signals(job: LaunchJob) -> list[str]:
    """A warning, or `scancel --batch`, stops the run after what has begun; it saves and ends."""
    return [
        f"# Slurm warns {job.need.grace} s before it takes the hosts away: the run saves and ends.",
        "warned=0 run=",
        f"trap 'warned=1; kill -TERM $run 2> /dev/null || true' {WARNING}",
        "trap 'kill -TERM $run 2> /dev/null || true' TERM",
    ]


def _end(job: LaunchJob) -> list[str]:
    stuck = f"put back {job.restarts} times; continue with: {job.continued()}"
    return [
        "run=$!",
        "# A signal ends a wait, not the run; the last wait has the exit code.",
        'while kill -0 "$run" 2> /dev/null; do wait "$run" || true; done',
        "code=0",
        'wait "$run" || code=$?',
        f'if [ "$warned" = 1 ] && {{ [ "$code" = {STOPPED} ] || [ "$code" = 143 ]; }}; then',
        f'  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.restarts} ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "  else",
        f"    echo {shlex.quote(stuck)} >&2",
        "  fi",
        "fi",
        'exit "$code"',
    ]

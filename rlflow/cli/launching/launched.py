"""A launch carried out: what is written of it, who it is handed to, what is printed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from rlflow.cli.launching.asked import ONCE, AskedLaunch, Where, asked_launch
from rlflow.cli.launching.kuberay import (
    CODE,
    MOST_ARCHIVE,
    KubeSite,
    object_name,
    ray_job,
    read_volumes,
)
from rlflow.cli.launching.shipped import too_much
from rlflow.cli.launching.slurm import SlurmSite, batch_script
from rlflow.cli.launching.ssh import run_by_ssh, ssh_text
from rlflow.cli.launching.submit import require_program, submit, unpack_code
from rlflow.cli.options import typed_words
from rlflow.cli.shell.printed import print_json
from rlflow.errors import Finding, UsageError
from rlflow.scheduler.devices.cluster import amount

NOTHING = "Nothing was submitted."
# Options that one kind of cluster alone has.
OWN: Mapping[Where, tuple[str, ...]] = {
    "slurm": ("partition", "account", "srun", "lines", "time", "restarts"),
    "k8s": ("image", "namespace", "volume", "secret", "time", "restarts"),
    "ssh": ("ssh_command",),
}
SITE = (
    *("hosts", "memory", "ship", "code_at", "setup", "env"),
    *dict.fromkeys(name for names in OWN.values() for name in names),
)


def launch_as_asked(
    *, slurm: bool, k8s: bool, ssh: str | None, dry_run: bool, as_json: bool, **options: Any
) -> None:
    """Write, ship and submit a run, or print all that; takes the options of `rlflow launch`."""
    where = _one_kind(slurm=slurm, k8s=k8s, ssh=ssh)
    typed = {**options, "slurm": slurm, "k8s": k8s, "ssh": ssh}
    site = {name: options.pop(name) for name in SITE}
    machines = [] if ssh is None else _machines(ssh)
    _require_own(where, site)
    if where == "k8s":
        _require_kube(site)
    site |= {"volumes": read_volumes(site["volume"]), "hosts": _hosts(site["hosts"], machines)}
    site |= {"launched": _launched(typed)}
    asked = asked_launch(where, options, site, folder=CODE if where == "k8s" else None)
    text = _written(asked, site, machines)
    if not dry_run:
        _submitted(asked, site, machines, text, as_json=as_json)
    elif as_json:
        _emit(asked, submitted=False, text=text)
    else:
        click.echo(text, nl=False)
        _told(asked)
        click.echo("dry run: nothing was written or submitted", err=True)


def _launched(typed: Mapping[str, Any]) -> tuple[str, ...]:
    """The words after `rlflow` that launch as it was typed, but for what is said of one start."""
    time = typed["time"]
    again = {**typed, **ONCE, "iterations": None, "time": None if time is None else f"{time:g}s"}
    return ("launch", *typed_words(click.get_current_context().command, again))


def _one_kind(*, slurm: bool, k8s: bool, ssh: str | None) -> Where:
    """The kind of cluster that is named. Raises UsageError E380 for none, or several."""
    kinds: dict[Where, bool] = {"slurm": slurm, "k8s": k8s, "ssh": ssh is not None}
    said = [kind for kind, is_said in kinds.items() if is_said]
    if len(said) != 1:
        raise _refused(
            "a launch goes to one kind of cluster",
            got=" and ".join(f"--{kind}" for kind in said) or "none",
            expected="--slurm, --k8s, or --ssh HOSTS",
            fix="--slurm --dry-run",
        )
    return said[0]


def _machines(said: str) -> list[str]:
    """The hosts that --ssh names. Raises UsageError E380 for none, and for what is no host."""
    hosts = [host.strip() for host in said.split(",") if host.strip()]
    if not hosts:
        raise _refused("--ssh names no host", got=repr(said), fix="--ssh node1,node2")
    twice = next((host for host in hosts if hosts.count(host) > 1), None)
    if twice is not None:
        raise _refused(f"--ssh names {twice} twice", expected="each host once, with its devices")
    for host in hosts:
        if host.startswith("-") or any(letter.isspace() for letter in host):
            raise _refused(f"--ssh {host} is no name of a host", expected="a name, or USER@NAME")
    return hosts


def _require_own(where: Where, site: Mapping[str, Any]) -> None:
    """Raise UsageError E380 for options that another kind of cluster has."""
    for names in OWN.values():
        others = [name for name in names if name not in OWN[where]]
        said = [name for name in others if site[name] is not None and site[name] != ()]
        if said:
            option = {"lines": "--line"}.get(said[0], "--" + said[0].replace("_", "-"))
            has = [f"--{each}" for each, own in OWN.items() if said[0] in own]
            image = where == "slurm" and said[0] == "image"
            raise _refused(
                f"{option} is an option of {' and '.join(has)}",
                got=f"--{where}",
                fix="--srun '--container-image=IMAGE'" if image else f"leave out {option}",
            )


def _require_kube(site: Mapping[str, Any]) -> None:
    """Raise UsageError E380 where something is not said without which no pod runs."""
    if not site["image"]:
        raise _refused(
            "pods need an image",
            expected="one that has rlflow, Ray and what the pipeline imports",
            fix="--image registry/name:tag",
        )
    if not site["volume"]:
        raise _refused(
            "the run directory has to outlive the pods, and to be seen by all of them",
            expected="a PersistentVolumeClaim that many pods may write",
            fix="--volume CLAIM:/shared",
        )
    passed = [text for text in site["env"] if "=" not in text]
    if passed and not site["secret"]:
        raise _refused(
            f"--env {passed[0]} has no value that may be written",
            expected="a Secret that has it",
            fix=f'kubectl create secret generic NAME --from-literal={passed[0]}="${passed[0]}"   '
            "then --secret NAME",
        )


def _hosts(said: int | None, machines: list[str]) -> int | None:
    """How many hosts there are to be; those that are named, where they are."""
    if said is not None and machines and said != len(machines):
        raise UsageError(
            Finding(
                code="E381",
                what=f"--hosts {said}, and --ssh names {len(machines)}",
                fix="leave out --hosts",
            ),
            summary=NOTHING,
        )
    return said or len(machines) or None


def _refused(what: str, *, got: str = "", expected: str = "", fix: str = "") -> UsageError:
    finding = Finding(code="E380", what=what, got=got, expected=expected, fix=fix)
    return UsageError(finding, summary=NOTHING)


def _written(asked: AskedLaunch, site: Mapping[str, Any], machines: list[str]) -> str:
    """What is submitted, as text."""
    job = asked.job
    if asked.where == "slurm":
        own = SlurmSite(
            partition=site["partition"], account=site["account"], srun=site["srun"] or ""
        )
        return batch_script(job, own)
    if asked.where == "ssh":
        return ssh_text(job, machines[: job.need.hosts], _ssh_words(site))
    if not any(Path(job.run_dir).is_relative_to(path) for _, path in site["volumes"]):
        raise _refused(
            f"the run directory {job.run_dir} is on no volume, and would end with its pod",
            expected="a folder of a volume",
            fix=f"--run-dir {site['volumes'][0][1]}/{Path(job.run_dir).name}",
        )
    if asked.archive is not None and asked.shipped is not None:
        size = len(asked.archive)
        if size > MOST_ARCHIVE:
            most = f"{amount(MOST_ARCHIVE)} packed, in a ConfigMap; they have {amount(size)}"
            raise UsageError(too_much(asked.shipped, most), summary=NOTHING)
    return ray_job(job, _kube(site), asked.archive)


def _kube(site: Mapping[str, Any]) -> KubeSite:
    return KubeSite(
        image=site["image"],
        namespace=site["namespace"],
        secret=site["secret"],
        volumes=site["volumes"],
    )


def _ssh_words(site: Mapping[str, Any]) -> list[str]:
    """The words that enter a host. Raises UsageError E380 for what no shell would read."""
    said = site["ssh_command"] or "ssh -o BatchMode=yes"
    try:
        return shlex.split(said)
    except ValueError as error:
        raise _refused(f"--ssh-command {said} is no command: {error}") from None


def _submitted(
    asked: AskedLaunch, site: Mapping[str, Any], machines: list[str], text: str, *, as_json: bool
) -> None:
    """Write, ship and submit, or run on the hosts; exits as the run does where it is waited for."""
    job = asked.job
    if asked.where == "ssh":
        _told(asked)
        hosts = machines[: job.need.hosts]
        code = run_by_ssh(job, hosts, _ssh_words(site), asked.archive)
        if code:
            click.echo(f"continue with: {job.continued()}", err=True)
        if as_json:
            _emit(asked, submitted=True, code=code)
        raise SystemExit(code)
    program = "sbatch" if asked.where == "slurm" else "kubectl"
    require_program(program)
    slurm, beside = asked.where == "slurm", Path(job.beside)
    beside.mkdir(parents=True)
    if slurm and asked.archive is not None:
        unpack_code(asked.archive, Path(job.unpacked))
    script = beside / ("job.sbatch" if slurm else "job.yaml")
    script.write_text(text, encoding="utf-8")
    if slurm:
        name = submit(["sbatch", "--parsable", str(script)]).partition(";")[0]
    else:
        space = ["--namespace", site["namespace"]] if site["namespace"] else []
        submit(["kubectl", "create", *space, "-f", str(script)])
        name = object_name(beside.name)
    if as_json:
        _emit(asked, submitted=True, id=name, script=str(script))
        return
    _told(asked)
    click.echo(name)
    for line in _next(asked, name, script):
        click.echo(line, err=True)


def _told(asked: AskedLaunch) -> None:
    """What goes where, on standard error."""
    code = asked.job.code if asked.shipped is None else asked.shipped.line()
    for line in (*asked.job.need.lines(), f"code: {code}", f"run directory: {asked.job.run_dir}"):
        click.echo(line, err=True)


def _next(asked: AskedLaunch, name: str, script: Path) -> list[str]:
    """How to look at what was submitted, and how to end it."""
    job = asked.job
    if asked.where == "slurm":
        log = f"{job.beside}/job-{name}.log"
        return [f"look: squeue -j {name}; tail -F {log}", f"end: scancel --batch -s TERM {name}"]
    return [
        f"look: kubectl get rayjob {name}; kubectl logs -f -l job-name={name}",
        f"end: kubectl delete -f {script}",
    ]


def _emit(asked: AskedLaunch, **facts: Any) -> None:
    """The launch as JSON on standard output."""
    job, shipped = asked.job, asked.shipped
    known = {
        "where": asked.where,
        "run_dir": job.run_dir,
        "code": job.code,
        "files": 0 if shipped is None else len(shipped.files),
        "command": ["rlflow", *job.words],
        "host": job.need.as_json(),
        **facts,
    }
    print_json(known)

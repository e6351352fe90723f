"""`rlflow launch`: the options of a run, and what only a user knows of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from rlflow.cli.options import lasting_options
from rlflow.cli.shell.printed import json_option
from rlflow.cli.shell.times import time_of

F = TypeVar("F", bound=Callable[..., Any])
LAUNCH_EXAMPLES = """\b
Examples:
  rlflow launch mine.py --slurm --devices h100:16 --partition gpu --time 4:00:00 --dry-run
  rlflow launch mine.py --k8s --devices h100:16 --image my/image:1 --volume shared:/shared
  rlflow launch mine.py --ssh node1,node2 --devices h100:16
"""


def site_options(function: F) -> F:
    """What only a user knows of a cluster."""
    for option in (
        click.option(
            "--line",
            "lines",
            multiple=True,
            metavar="TEXT",
            help="Slurm: a line more at the top of the script: '#SBATCH --constraint=ib'.",
        ),
        click.option("--srun", metavar="WORDS", help="Slurm: more words for srun."),
        click.option("--account", metavar="NAME", help="Slurm: who pays."),
        click.option("--partition", metavar="NAME", help="Slurm: the partition."),
        click.option("--secret", metavar="NAME", help="Kubernetes: the Secret of --env NAME."),
        click.option(
            "--volume",
            multiple=True,
            metavar="CLAIM:/PATH",
            help="Kubernetes: a claim that all pods mount there; the first has the run.",
        ),
        click.option("--namespace", metavar="NAME", help="Kubernetes: the namespace."),
        click.option("--image", metavar="IMAGE", help="Kubernetes: an image with rlflow and Ray."),
        click.option(
            "--ssh-command",
            metavar="WORDS",
            help="ssh: what enters a host; ssh -o BatchMode=yes by default.",
        ),
        click.option(
            "--time",
            type=time_of("--time", bare=False),
            metavar="TIME",
            help="Slurm, Kubernetes: the longest it may take; 4:00:00, 90m or 2d.",
        ),
        click.option(
            "--restarts",
            type=click.IntRange(0),
            help="Slurm, Kubernetes: how often it is put back in the queue after it lost its "
            "hosts; 10 by default.",
        ),
    ):
        function = option(function)
    return function


def shipping_options(function: F) -> F:
    """How many hosts, how large, and with what on them."""
    for option in (
        click.option(
            "--env",
            multiple=True,
            metavar="KEY=VALUE|NAME",
            help="A variable; of a NAME alone the value is passed and not written. Repeatable.",
        ),
        click.option(
            "--setup",
            multiple=True,
            metavar="LINE",
            help="A line of shell before all others: 'source env/bin/activate'. Repeatable.",
        ),
        click.option(
            "--code-at", metavar="DIR", help="Where the hosts have the code; nothing is shipped."
        ),
        click.option(
            "--ship", multiple=True, metavar="PATH", help="Ship this too, which git ignores."
        ),
        click.option(
            "--memory", metavar="SIZE", help="Memory of each host; as the plan counts by default."
        ),
        click.option(
            "--hosts",
            type=click.IntRange(1),
            help="Hosts that share the devices; as many as servers of the kind by default.",
        ),
    ):
        function = option(function)
    return function


@click.command("launch", no_args_is_help=True, epilog=LAUNCH_EXAMPLES)
@lasting_options
@site_options
@shipping_options
@click.option("--ssh", metavar="HOSTS", help="Run on these hosts by ssh: node1,node2.")
@click.option("--k8s", is_flag=True, help="Submit a RayJob of KubeRay with kubectl.")
@click.option("--slurm", is_flag=True, help="Submit a batch script with sbatch.")
@click.option("-n", "--dry-run", is_flag=True, help="Print what would be submitted, and end.")
@json_option
def launch_run(
    slurm: bool, k8s: bool, ssh: str | None, dry_run: bool, as_json: bool, **options: Any
) -> None:
    """Run a pipeline on a cluster: sized by its plan, shipped, submitted, put back and resumed."""
    from rlflow.cli.launching.launched import launch_as_asked

    launch_as_asked(slurm=slurm, k8s=k8s, ssh=ssh, dry_run=dry_run, as_json=as_json, **options)

"""A run to be launched, as every kind of cluster is told of it: words, folders, environment.

The lines of shell that they share are here. A run is started once and then resumed: whichever
it is, is decided by what lies in its directory when it starts.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from rlflow.cli.continuing import LAUNCHED
from rlflow.cli.launching.hosts import HostNeed
from rlflow.cli.launching.variables import LaunchVariables
from rlflow.runtime.ray.cluster.niceness import NICENESS, VARIABLE
from rlflow.scheduler.plan.text import counted

JOIN_SECONDS = 600
# Of a host's own addresses, the first that other hosts reach by IPv4.
FIND_ADDRESS = (
    "address=$(printf '%s\\n' $(hostname --ip-address) $(hostname --all-ip-addresses) "
    "| grep -v -e '^127\\.' -e : | head -n 1)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """A run on a cluster. All paths are absolute, and are those of the hosts.

    `launched` are the words after `rlflow` that launch it, but for the run's directory and the
    iterations in all. `words` are those after `rlflow`, without the run's directory; `first` and
    `again` are said only where the run starts, and where it goes on. `code` is the folder that it
    starts in, `beside` the one beside the run directory with what belongs to the launch. `programs`
    is the folder of `rlflow` and `ray`, empty where `setup` finds them. `time` are the seconds that
    it may take.
    """

    name: str
    title: str
    launched: tuple[str, ...]
    words: tuple[str, ...]
    first: tuple[str, ...]
    again: tuple[str, ...]
    run_dir: str
    beside: str
    unpacked: str
    code: str
    programs: str
    setup: tuple[str, ...]
    variables: LaunchVariables
    need: HostNeed
    restarts: int
    time: float | None = None
    raw: tuple[str, ...] = ()

    def described(self) -> list[str]:
        """Comments at the top of what is written: what it is, and where its sizes come from."""
        passed = ", ".join(self.variables.passed)
        keys = f"{passed}: passed by name, written nowhere" if passed else ""
        return [f"# {line}" for line in (self.title, *self.need.lines(), keys) if line]

    def environment(self) -> list[str]:
        """Lines that set up a host, in the folder of the code."""
        path = [f'export PATH={shlex.quote(self.programs)}:"$PATH"'] if self.programs else []
        missing = '{ echo "no rlflow on $(hostname): see --setup" >&2; exit 127; }'
        return [
            *self.setup,
            *path,
            "export RAY_USAGE_STATS_ENABLED=0",
            f"export {VARIABLE}={NICENESS}",
            *self.variables.exports(),
            f"command -v rlflow > /dev/null || {missing}",
            f"cd {shlex.quote(self.code)}",
        ]

    def chosen(self) -> list[str]:
        """Lines that set `way`: to start the run, or to go on with it."""
        run = shlex.quote(self.run_dir)
        return [
            f"if [ -e {shlex.quote(f'{self.run_dir}/run.json')} ]; then",
            f"  way=({shlex.join(['--resume', self.run_dir, *self.again])})",
            "else",
            f"  way=({' '.join(['--run-dir', run, *map(shlex.quote, self.first)])})",
            "fi",
            "# The line that continues the run is that of a launch: this cluster ends with it.",
            f"export {LAUNCHED}={shlex.quote(shlex.join(self.launched))}",
        ]

    def continued(self) -> str:
        """The line that launches the run again, from where it was typed first."""
        return shlex.join(["rlflow", *self.launched, "--resume", self.run_dir])

    def command(self, address: str) -> str:
        """The run as one types it; `address` is shell, empty where no cluster is joined."""
        joined = f" --address {address} --wait {JOIN_SECONDS}" if address else ""
        return f'{shlex.join(["rlflow", *self.words])}{joined} "${{way[@]}}"'

    def ray_start(self, *words: str) -> str:
        """The line that starts a node of Ray with what the plan needs of a host."""
        sizes = [
            f"--num-cpus={self.need.devices * self.need.threads}",
            f"--num-gpus={self.need.gpus}",
            f"--object-store-memory={self.need.store}",
        ]
        return " ".join(["ray start --block", *words, *sizes])


def title_of(pipeline: str, placement: str, version: str, need: HostNeed) -> str:
    """One line that says what is launched."""
    where = counted(need.hosts, "host")
    return f"Written by rlflow {version}: {pipeline}, placement {placement}, on {where}."

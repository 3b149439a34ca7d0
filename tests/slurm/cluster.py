"""A real SLURM on one machine: slurmctld on a host of its own, and a slurmd on each node.

All its files are in one folder, which SLURM_CONF tells to the commands: an installation of SLURM on the machine is not
touched.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.slurm.hosts import Hosts, when_true, why_impossible

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2")
PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "ip")
MAY_INSTALL = ("CI", "GPP_INSTALL_SLURM")
"""Environment variables that allow the tests to install SLURM, if one of them is true."""
HEAD = "head"
REPOSITORY = Path(__file__).parents[2]

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={head}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also the delay before a requeued job may start again: 120 s by default, at least 5 s
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout={node_timeout}
InactiveLimit=0
KillWait=30
MinJobAge=600
MessageTimeout=10
JobRequeue=1
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=100000,batch_sched_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# nodes have more CPUs than the machine
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PartitionName=test Nodes=ALL Default=YES MaxTime=60 DefaultTime=20 State=UP
"""

_SACCT = r"""#!/usr/bin/env python3
# What submitit asks sacct for, on a cluster without accounting.
import re, subprocess, sys
print("JobID|State|NodeList")
for job in sys.argv[sys.argv.index("-j") + 1].split(",") if "-j" in sys.argv else ():
    shown = subprocess.run(["scontrol", "show", "job", "-o", job], capture_output=True, text=True).stdout
    for line in shown.splitlines():
        of = dict(re.findall(r"(\w+)=(\S*)", line))
        name = f"{of['ArrayJobId']}_{of['ArrayTaskId']}" if "ArrayJobId" in of else of["JobId"]
        print(f"{name}|{of['JobState']}|{of['NodeList']}")
"""


def why_not_here() -> str:
    """The reason why this machine cannot have a cluster; empty if it can. Installs SLURM where that is allowed."""
    if _missing() and any(os.environ.get(name, "").lower() in ("1", "true") for name in MAY_INSTALL):
        _install()
    if _missing():
        return f"{_missing()[0]} is not installed; GPP_INSTALL_SLURM=1 lets the tests install {', '.join(PACKAGES)}"
    return why_impossible()


def _missing() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program) is None]


def _install() -> None:
    quiet = {"env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, "capture_output": True, "timeout": 300}
    subprocess.run(["apt-get", "update", "-qq"], **quiet)
    subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES], **quiet)


class Cluster:
    """A cluster with nodes `node1`, `node2`, ..., from `__enter__` to `__exit__`.

    `node_timeout`: seconds after which SLURM gives up a node that does not answer.
    """

    def __init__(self, folder: Path, num_nodes: int, node_timeout: int = 5) -> None:
        self.folder = folder
        self.nodes = [f"node{number}" for number in range(1, num_nodes + 1)]
        self.hosts = Hosts([HEAD, *self.nodes], folder)
        self._node_timeout = node_timeout
        programs = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        self.environment: Mapping[str, str] = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": os.pathsep.join(programs),
            "PYTHONPATH": os.pathsep.join(
                [str(REPOSITORY), str(REPOSITORY / "examples"), os.environ.get("PYTHONPATH", "")]
            ),
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def __enter__(self) -> Cluster:
        self._write()
        self.hosts.__enter__()
        try:
            self._start()
        except BaseException:
            self.hosts.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.hosts.__exit__()

    def _write(self) -> None:
        lines = [f"NodeName={name} NodeAddr={self.hosts.address(name)} CPUs=8 RealMemory=16000" for name in self.nodes]
        configuration = _CONFIGURATION.format(
            head=HEAD, address=self.hosts.address(HEAD), folder=self.folder, node_timeout=self._node_timeout
        )
        for name in ("bin", "state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(configuration + "\n".join(lines) + "\n")
        (self.folder / "bin/sacct").write_text(_SACCT)
        (self.folder / "bin/sacct").chmod(0o755)
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)

    def _start(self) -> None:
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._spawn(HEAD, "munged", "--foreground", "--force", f"--log-file={self.folder / 'munge.log'}", *options)
        self.until(lambda: (self.folder / "munge.socket").exists(), 10, "munged")
        self._spawn(HEAD, "slurmctld", "-D")
        for node in self.nodes:
            self._spawn(node, "slurmd", "-D", "-N", node)
        self.until(lambda: self.idle() == self.nodes, 30, "idle nodes")

    def _spawn(self, host: str, *command: str) -> None:
        self.hosts.spawn(host, command, self.folder / f"{command[0]}-{host}.out", self.environment)

    # -- nodes

    def idle(self) -> list[str]:
        """The nodes that would take a job."""
        lines = (line.split() for line in self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines())
        return sorted({name for name, state in lines if state == "idle"})

    def crash(self, node: str) -> None:
        """A power failure of a node."""
        self.hosts.crash(node)

    def start(self, node: str) -> None:
        """Start a node after its crash."""
        self.hosts.start(node)
        self._spawn(node, "slurmd", "-D", "-N", node)

    # -- jobs

    def run(self, *command: str, folder: Path = REPOSITORY, timeout: float = 60.0) -> str:
        """The output of a command on the head."""
        done = self.hosts.run(HEAD, *command, folder=folder, env=self.environment, timeout=timeout)
        assert done.returncode == 0 or command[0] == "sinfo", f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *arguments: str | Path, folder: Path, **variables: object) -> Job:
        """Submit a script, in a folder, with environment variables."""
        given = [f"{name}={value}" for name, value in variables.items()]
        told = self.run("env", *given, "sbatch", "--parsable", *map(str, arguments), folder=folder)
        return Job(self, int(told.split(";")[0]), folder)

    def until(self, condition: Callable[[], object], seconds: float, awaited: str) -> None:
        when_true(condition, seconds, lambda: f"{awaited}. {self._logs()}")

    def _logs(self) -> str:
        logs = (*self.folder.glob("*.out"), *self.folder.glob("slurm*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


class Job:
    """A job that was submitted in a folder, where its output is in `slurm-JOB.out`."""

    def __init__(self, cluster: Cluster, number: int, folder: Path) -> None:
        self.cluster, self.number, self.folder = cluster, number, folder

    def shown(self) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        return dict(re.findall(r"(\w+)=(\S*)", self.cluster.run("scontrol", "show", "job", "-o", str(self.number))))

    @property
    def state(self) -> str:
        return self.shown()["JobState"]

    @property
    def output(self) -> str:
        path = self.folder / f"slurm-{self.number}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def ask(self, name: str, *, everyone: bool = False) -> None:
        """Send a signal to the script, as `sbatch --signal=B:...` does; or to all tasks."""
        whom = [f"{self.number}.0"] if everyone else ["--batch", str(self.number)]
        self.cluster.run("scancel", f"--signal={name}", *whom)

    @property
    def ended(self) -> bool:
        """False also for a job that is queued again."""
        return self.state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

    def wait(self, seconds: float = 60.0) -> dict[str, str]:
        """Wait for the end of the job; its fields."""
        self.until(lambda: self.ended, seconds, "end")
        return self.shown()

    def wait_for(self, text: str, seconds: float = 60.0, times: int = 1) -> None:
        """Wait until the output has a text, so many times."""
        self.until(lambda: self.output.count(text) >= times, seconds, repr(text))

    def until(self, condition: Callable[[], object], seconds: float, awaited: str) -> None:
        when_true(condition, seconds, lambda: f"{awaited}. {self.shown()}\n{self.output}")

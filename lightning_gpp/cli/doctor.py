"""`gpp-doctor`: measures the devices and links of a job's processes; explains messages."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_gpp.cli.help import parser_of, run_parsed
from lightning_gpp.errors import ConfigError, GPPError, did_you_mean
from lightning_gpp.explained import sections

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment

NAME: Final = "gpp-doctor"
ABOUT: Final = (
    "Measures what the processes of a job have: their devices, and the links between them. Exits with 1 if they do not "
    "find each other."
)
EXAMPLES: Final = (
    (NAME, "This machine: a process for each GPU, or two on the CPU."),
    (f"{NAME} --processes 4 --output cluster.yaml", "Writes what was measured, for strategy.cluster=cluster.yaml."),
    (f"srun {NAME}", "All tasks of a SLURM job."),
    ("torchrun --nproc-per-node 4 -m lightning_gpp.cli.doctor", "All processes of torchrun, also on several nodes."),
    (f"{NAME} explain no-room", "Explains a message, by the short name at its end."),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_parsed(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(NAME, ABOUT, EXAMPLES)
    parser.add_argument("--processes", type=int, metavar="N", help="number of processes, if no launcher starts them")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the cluster that was measured")
    parser.set_defaults(task=_start)
    explain = parser.add_subparsers(metavar="explain").add_parser("explain", help="explain a message")
    explain.add_argument("name", help="its short name")
    explain.set_defaults(task=_explain)
    return parser


def _explain(given: argparse.Namespace) -> None:
    known = sections()
    if given.name not in known:
        raise ConfigError(f"explain {given.name}: no message has this short name.{did_you_mean(given.name, known)}")
    print(known[given.name])


def _start(given: argparse.Namespace) -> None:
    """Examine the processes of torchrun or srun, or as many that are started here."""
    import torch  # takes seconds to load, which explanations need not wait for
    from lightning.fabric.plugins.environments.lightning import find_free_network_port
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from torch.multiprocessing.spawn import ProcessExitedException, start_processes

    if given.processes is not None and given.processes < 1:
        raise ConfigError(f"--processes={given.processes} must be 1 or more.")
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*", category=FutureWarning)  # of torch, to itself
    if TorchElasticEnvironment.detect():
        _examine(TorchElasticEnvironment(), given)
    elif "SLURM_STEP_ID" in os.environ and SLURMEnvironment.detect():  # not in sbatch's script, which is one process
        _examine(SLURMEnvironment(auto_requeue=False), given)
    else:
        number = given.processes or torch.cuda.device_count() or 2
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(find_free_network_port()))
        try:
            start_processes(_process, (number, given), number)
        except ProcessExitedException as error:
            sys.exit(error.exit_code)


def _process(rank: int, number: int, given: argparse.Namespace) -> None:
    """A process that is started here, as if torchrun had."""
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{number}", TORCHELASTIC_RUN_ID=NAME)
    _start(given)


def _examine(environment: ClusterEnvironment, given: argparse.Namespace) -> None:
    """Print what is found, on rank 0, or what is wrong; exits with 1 if something is."""
    from lightning_gpp.cli.examination import Examination
    from lightning_gpp.strategy.processes import leave

    failed = False
    try:
        examination = Examination(environment)
        for title, text in examination.findings(given.output):
            if examination.rank == 0:
                print(f"{title:<11}{text}", flush=True)
    except GPPError as error:
        failed = True
        print(f"{NAME}: {error}", file=sys.stderr, flush=True)
    leave()
    sys.exit(int(failed))


if __name__ == "__main__":
    main()

"""Runs scenarios in one process and on two ranks, and compares every fact on every rank.

Scenarios follow each other in the same processes. A refusal or a failure may end them; then the next scenarios get new
ones.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lightning_gpp import GPPStrategy
from lightning_gpp.errors import GPPError
from lightning_gpp.training.tensors.gathered import Door
from lightning_gpp.training.whole.whole_step import WholeStep
from tests import distributed
from tests.acceptance.scenarios import scenarios
from tests.acceptance.scenarios.base import Chain, Facts, staged
from tests.acceptance.scenarios.marks import DOOR, SAME, WHOLE

distributed.preload("lightning.pytorch", "tests.acceptance.scenarios.runner")

RANKS: Final = 2
TOLERANCE: Final = 1e-9
"""Relative; some facts are of float32."""
PATIENCE: Final = 180.0
"""Seconds for one scenario."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a scenario.

    Attributes:
        kind: "same", "whole" or "door" if all facts are those of one process, by what it took; otherwise "different",
            "refused" or "crashed".
        message: the facts that differ, the refusal, or the error.
    """

    name: str
    kind: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What a scenario gave on one rank: facts, or an error.

    Attributes:
        kind: "done", "refused" or "crashed".
        used: whether a training step ran as a whole ("whole"), and the door was opened ("door").
    """

    kind: str
    facts: Facts | None = None
    message: str = ""
    used: frozenset[str] = frozenset()


class Rows(Logger):
    """Keeps what is logged, on global rank 0 as all loggers do."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    name = "rows"
    version = 0

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append({"step": step or 0, **metrics})

    @rank_zero_only
    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def make_trainer(
    folder: Path, ranks: int, *, gpp: Mapping[str, Any] | None = None, with_logger: bool = False, **options: Any
) -> pl.Trainer:
    """A trainer of one process, or of all ranks with the strategy."""
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": Rows() if with_logger else False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
        **options,
    }
    if ranks == 1:
        return pl.Trainer(devices=1, **given)
    limits = {"failure_timeout": PATIENCE, "timeout": PATIENCE}
    strategy = GPPStrategy(**{**staged(Chain), "num_micro_batches": 2, **limits, **(gpp or {})})
    return pl.Trainer(strategy=strategy, devices=ranks, **given)


def run_scenarios(names: Sequence[str]) -> list[Outcome]:
    """Run scenarios in one process and on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        _run(1, names, Path(folder) / "one")
        _run(RANKS, names, Path(folder) / "two")
        return [_outcome(name, Path(folder)) for name in names]


def _run(ranks: int, names: Sequence[str], folder: Path) -> None:
    folder.mkdir()
    while rest := [name for name in names if not list(folder.glob(f"{name}.[0-9]"))]:
        limit = PATIENCE * (1 + len(rest))
        try:
            distributed.run_distributed(ranks, _work, ranks, str(folder), rest, timeout=limit)
        except AssertionError as error:
            if len(left := [name for name in rest if not list(folder.glob(f"{name}.[0-9]"))]) == len(rest):
                (folder / f"{left[0]}.9").write_bytes(pickle.dumps(Report("crashed", message=str(error)[-2000:])))


def _work(rank: int, ranks: int, folder: str, names: Sequence[str]) -> None:
    faulthandler.cancel_dump_traceback_later()
    if ranks > 1:
        os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(ranks))
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning_utilities.core.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    known = scenarios()
    for name in names:
        place = Path(folder, "files", name)
        place.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}/stacks{rank}", "w") as stacks:
            faulthandler.dump_traceback_later(PATIENCE, exit=True, file=stacks)
            torch.manual_seed(0)
            report = _attempt(partial(known[name], partial(make_trainer, place, ranks), place))
            faulthandler.cancel_dump_traceback_later()
        _leave(Path(folder), name, rank, ranks, _of_rank(report, rank))


def _attempt(function: Any) -> Report:
    try:
        with _noted(WholeStep, "reducing", WHOLE) as whole, _noted(Door, "open", DOOR) as door:
            facts = function()
        return Report("done", facts, used=frozenset(whole | door))
    except GPPError as error:
        return Report("refused", message=f"{type(error).__name__}: {error}")
    except BaseException:
        return Report("crashed", message=traceback.format_exc())


@contextmanager
def _noted(kind: type, method: str, word: str) -> Iterator[set[str]]:
    """Inside, calls of a method leave a word in the set."""
    used, plain = set[str](), vars(kind)[method]

    def noting(*args: Any, **kwargs: Any) -> Any:
        used.add(word)
        return plain(*args, **kwargs)

    with patch.object(kind, method, noting):
        yield used


def _of_rank(report: Report, rank: int) -> Report:
    """The report without what only rank 0 has."""
    facts = report.facts if rank == 0 or report.facts is None else _shared(report.facts)
    return replace(report, facts=facts)


def _shared(facts: Facts) -> Facts:
    return {name: fact for name, fact in facts.items() if not name.startswith("zero")}


def _leave(folder: Path, name: str, rank: int, ranks: int, report: Report) -> None:
    """Leave a report, and wait for the other rank's; end after a failure of any rank, which may have ended others."""
    file = folder / f"new {name} {rank}"
    file.write_bytes(pickle.dumps(report))
    file.rename(folder / f"{name}.{rank}")
    if ranks == 1:
        return
    deadline = time.monotonic() + (PATIENCE if report.kind == "done" else 5.0)
    while len(found := _reports(folder, name)) < ranks and time.monotonic() < deadline:
        time.sleep(0.02)
    if len(found) < ranks or any(other.kind != "done" for other in found.values()):
        os._exit(1)


def _reports(folder: Path, name: str) -> dict[int, Report]:
    return {int(file.suffix[1:]): pickle.loads(file.read_bytes()) for file in sorted(folder.glob(f"{name}.[0-9]"))}


def _outcome(name: str, folder: Path) -> Outcome:
    (plain,), ranks = _reports(folder / "one", name).values(), _reports(folder / "two", name)
    if plain.kind != "done":
        return Outcome(name=name, kind="different", message=f"fails in one process, too: {plain.message[-1500:]}")
    kinds = {report.kind for report in ranks.values()}
    for kind in ("refused", "crashed"):
        if kind in kinds:
            return Outcome(name=name, kind=kind, message=next(r.message for r in ranks.values() if r.kind == kind))
    if len(ranks) < RANKS:
        return Outcome(name=name, kind="crashed", message=f"only the ranks {sorted(ranks)} came to its end")
    told = [f"rank {rank}: {text}" for rank, report in ranks.items() for text in _differences(plain, report, rank)]
    used = set().union(*(report.used for report in ranks.values()))
    reached = next((kind for kind in (DOOR, WHOLE) if kind in used), SAME)
    return Outcome(name=name, kind="different" if told else reached, message="\n".join(told))


def _differences(plain: Report, report: Report, rank: int) -> list[str]:
    expected, found = _of_rank(plain, rank).facts or {}, report.facts or {}
    told = [f"{n} is {found.get(n)}, not {expected[n]}" for n in expected if not _same(n, found, expected)]
    return [text[:600] for text in told]


def _same(name: str, found: Facts, expected: Facts) -> bool:
    if name not in found:
        return False
    wanted, here = expected[name], found[name]
    if name == "state":  # a rank has its part
        wanted = {key: value for key, value in wanted.items() if key in here}
    return _alike(here, wanted)


def _alike(here: Any, wanted: Any) -> bool:
    if isinstance(wanted, Tensor):
        return isinstance(here, Tensor) and here.shape == wanted.shape and _close(here, wanted)
    if isinstance(wanted, float) and isinstance(here, float | int):
        return _close(torch.tensor(float(here)).double(), torch.tensor(wanted).double())
    if isinstance(wanted, str) and isinstance(here, str):
        (texts, numbers), (others, known) = _with_numbers(here), _with_numbers(wanted)
        return texts == others and all(map(_alike, numbers, known))
    if isinstance(wanted, Mapping):
        return (
            isinstance(here, Mapping) and list(here) == list(wanted) and all(_alike(here[k], wanted[k]) for k in wanted)
        )
    if isinstance(wanted, list | tuple):
        return len(here) == len(wanted) and all(map(_alike, here, wanted))
    return bool(here == wanted)


def _with_numbers(text: str) -> tuple[list[str], list[float]]:
    """A text around numbers that are printed with all their digits, and these, which machines round differently."""
    parts = re.split(r"(\d+\.\d{8,})", text)
    return parts[::2], list(map(float, parts[1::2]))


def _close(here: Tensor, wanted: Tensor) -> bool:
    tolerance = TOLERANCE if wanted.dtype == torch.float64 else 1e-6
    kind = torch.complex128 if wanted.is_complex() else torch.float64
    return torch.allclose(here.to(kind), wanted.to(kind), rtol=tolerance, atol=tolerance, equal_nan=True)

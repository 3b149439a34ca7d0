"""The commands of README and docs, and the way in which a test runs each of them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.cli.commands import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md")))
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHORT = ("trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=2")
QUICK = ("strategy.search_seconds=2",)


@dataclass(frozen=True, slots=True)
class Documented:
    """A command of a page."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


@dataclass(frozen=True, slots=True)
class Run:
    """Run it, with further arguments that make it shorter."""

    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another test runs it, or what it stands for; `reason` is why not here."""

    test: str
    reason: str


Way = Run | Elsewhere

WAYS: tuple[tuple[str, Way], ...] = (
    (r"(job=\$\()?sbatch|squeue|scancel|.*hydra/launcher=slurm", Elsewhere("tests/slurm/test_page.py", "SLURM")),
    (r"make (demo|test)", Elsewhere("tests/benchmarks/test_first_steps.py", "makes an environment")),
    (r".* trainer=gpu\b", Elsewhere("tests/benchmarks/test_gpu.py", "a GPU")),
    (r"python -m gpp_examples\.finetune", Elsewhere("tests/examples/test_finetune.py", "a model of the internet")),
    (r"python -m gpp_examples\.lightning_cli", Elsewhere("tests/examples/test_lightning_cli.py", "an extra")),
    (r"python -m benchmarks\.quality", Elsewhere("tests/benchmarks/test_quality.py", "hours")),
    (r"torchrun ", Elsewhere("tests/strategy/test_launch.py", "another launcher")),
    (r"gpp-init", Run()),
    (r"cd ", Run()),
    (r"gpp-train .*debug=", Run()),
    (r"gpp-train", Run(SHORT)),
    (r"gpp-plan .*model\.width=2048", Run(("strategy.search_seconds=1",))),
    (r"gpp-plan", Run(QUICK)),
    (r"gpp-checkpoint|gpp-doctor", Run()),
    (r"srun gpp-doctor", Elsewhere("tests/slurm/test_doctor.py", "SLURM")),
    (r"python -m benchmarks\.workloads", Run()),
)
"""The first pattern that a command begins with has its way."""


def documented(page: Path) -> list[Documented]:
    """The commands of a page's bash blocks, in order."""
    lines = "".join(BLOCK.findall(page.read_text())).replace("\\\n", " ").splitlines()
    parts = [part.strip() for line in lines for part in re.sub(r"\s#\s.*", "", line).split("&&")]
    return [Documented(str(page.relative_to(ROOT)), " ".join(part.split())) for part in parts if part]


def way_of(command: Documented) -> Way | None:
    return next((way for pattern, way in WAYS if re.match(pattern, command.text)), None)


COMMANDS = [command for page in PAGES for command in documented(page)]

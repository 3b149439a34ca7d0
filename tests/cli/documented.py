"""The commands of README and docs, and what a test adds to run them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.cli.commands import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md")))
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Documented:
    """A command of a page."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


ELSEWHERE = re.compile(
    r"(job=\$\()?sbatch|srun|squeue|scancel|.*hydra/launcher=slurm|make (demo|test)|.* trainer=gpu\b|torchrun "
    r"|python -m (gpp_examples\.(finetune|lightning_cli)|benchmarks\.quality)"
)
"""Commands that other tests run: with SLURM, a GPU, the internet, an extra, another launcher, or for hours."""

FURTHER: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"gpp-train .*debug=", ()),
    (r"gpp-train", ("trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=2")),
    (r"gpp-plan .*model\.width=2048", ("strategy.search_seconds=1",)),
    (r"gpp-plan", ("strategy.search_seconds=2",)),
)
"""Further arguments that make a command shorter: those of the first pattern that it begins with."""


def documented(page: Path) -> list[Documented]:
    """The commands of a page's bash blocks, in order."""
    lines = "".join(BLOCK.findall(page.read_text())).replace("\\\n", " ").splitlines()
    parts = [part.strip() for line in lines for part in re.sub(r"\s#\s.*", "", line).split("&&")]
    return [Documented(str(page.relative_to(ROOT)), " ".join(part.split())) for part in parts if part]


def further(command: Documented) -> tuple[str, ...]:
    return next((arguments for pattern, arguments in FURTHER if re.match(pattern, command.text)), ())


COMMANDS = [command for page in PAGES for command in documented(page)]

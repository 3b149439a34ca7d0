"""Checks of the user's compiled modules: which of them still run compiled in stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from lightning_gpp._compat.torch import is_compiled, uncompiled
from lightning_gpp.capture import Capture
from lightning_gpp.stages import Pipeline
from lightning_gpp.stages.build import CapturedStage
from lightning_gpp.stages.slices import innermost
from lightning_gpp.stages.undivided import Captured


def compiled_steps(module: nn.Module, steps: Sequence[str]) -> Iterator[str]:
    """Refusals of steps that are compiled together with the network that is to be cut."""
    for step in steps:
        function = getattr(module, step, None)
        if uncompiled(function) is not function:
            yield (
                f"{type(module).__name__}.{step} is compiled (torch.compile) with the network inside, which is to be "
                "cut into stages. Compile modules that it calls and that stages call undivided, for example "
                "self.encoder.compile()."
            )


def warning_of_cuts(module: nn.Module, captured: Captured, pipeline: Pipeline) -> str:
    """A warning of compiled modules that no stage calls, because stages hold parts of them; empty without any."""
    cut = _cut(module, captured, pipeline)
    if not cut:
        return ""
    return (
        f"{', '.join(cut)}: compiled (torch.compile), but cut by the plan, so that its parts run without being "
        "compiled. Compile the parts that stages call undivided, or keep the module in one stage (strategy.stages)."
    )


def _cut(module: nn.Module, captured: Captured, pipeline: Pipeline) -> list[str]:
    if not isinstance(captured, Capture):
        return []
    stages = map(innermost, pipeline.stages)
    whole = {path for stage in stages if isinstance(stage, CapturedStage) for path in stage.modules}
    called = dict.fromkeys(call.path for call in captured.network.modules)
    compiled = [path for path in called if is_compiled(module.get_submodule(path))]
    return [path or type(module).__name__ for path in compiled if not any(_inside(path, other) for other in whole)]


def _inside(path: str, other: str) -> bool:
    return not other or path == other or path.startswith(f"{other}.")

"""Times and memory of a split backward, compared with torch.distributed.pipelining's own split, in one run.

    python benchmarks/split_backward.py [cpu | cuda]

F is a forward, B a full backward, I and W its two parts. "Added" is the time of F + I + W over that of F + B. Bytes are
those that a micro-batch holds after F, and between I and W, with the gradient of its input. Repetitions of all variants
are interleaved; the table has the shortest times, which other work on the machine disturbs least.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.profiler import ProfilerActivity, profile

from lightning_gpp.runtime.split import SplitBackward, Splitter

DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
Action = Callable[[], object]
VARIANTS = ("full", "torch", "ours")


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    module: nn.Module
    shape: tuple[int, ...]
    repetitions: int


def cases() -> Iterator[Case]:
    yield Case(name="MLP, 2 layers of 8", module=mlp(8), shape=(1, 8), repetitions=1000)
    yield Case(name="MLP, 2 layers of 1024, 256 samples", module=mlp(1024), shape=(256, 1024), repetitions=20)
    block = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True, norm_first=True)
    yield Case(name="transformer block, hidden 256, 4 x 128", module=block, shape=(4, 128, 256), repetitions=20)
    stage = nn.TransformerEncoder(block, 12, enable_nested_tensor=False)
    yield Case(name="12 transformer blocks, hidden 256, 1 x 128", module=stage, shape=(1, 128, 256), repetitions=25)


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


def actions(variant: str, module: nn.Module, leaf: Tensor, seed: Tensor, splitter: Splitter) -> dict[str, Action]:
    """F, and then B or I and W, of one micro-batch."""
    split, kept = SplitBackward(splitter), {}

    def forward() -> None:
        output = module(leaf)
        kept["output"] = output if variant == "torch" else get_gradient_edge(output)

    def backward() -> None:
        torch.autograd.backward([kept.pop("output")], [seed])

    def torch_input() -> None:
        _, kept["groups"] = stage_backward_input([kept.pop("output")], [seed], [leaf], module.parameters())

    def torch_weight() -> None:
        stage_backward_weight(module.parameters(), kept.pop("groups"))

    if variant == "full":
        return {"F": forward, "B": backward}
    if variant == "torch":
        return {"F": forward, "I": torch_input, "W": torch_weight}
    input_gradients = lambda: split.input_gradients([kept.pop("output")], [seed], {"x": leaf})  # noqa: E731
    return {"F": forward, "I": input_gradients, "W": split.weight_gradients}


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds(action: Action) -> float:
    synchronize()
    start = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - start


def allocated(action: Action) -> int:
    """Bytes that an action allocates and does not free."""
    if DEVICE.type == "cuda":
        before = torch.cuda.memory_allocated()
        action()
        return torch.cuda.memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        action()
    return sum(event.self_device_memory_usage or event.self_cpu_memory_usage for event in profiler.key_averages())


def measure(case: Case) -> None:
    module = case.module.to(DEVICE)
    seed = torch.randn(case.shape, device=DEVICE)
    splitter = Splitter()
    times: dict[tuple[str, str], list[float]] = {}

    def actions_of(variant: str) -> dict[str, Action]:
        return actions(variant, module, torch.randn_like(seed).requires_grad_(), seed, splitter)

    for _ in range(case.repetitions + 3):
        for variant in VARIANTS:
            for name, action in actions_of(variant).items():
                times.setdefault((variant, name), []).append(seconds(action))
    shortest = {key: min(values[3:]) for key, values in times.items()}
    for variant in VARIANTS:
        first, second, *_ = (allocated(action) for action in actions_of(variant).values())
        print_row(case, variant, shortest, first, first + second)


def print_row(case: Case, variant: str, shortest: dict[tuple[str, str], float], after_f: int, between: int) -> None:
    full = shortest["full", "F"] + shortest["full", "B"]
    whole = sum(value for (name, _), value in shortest.items() if name == variant)
    cells = [f"{shortest[variant, a] * 1e3:.3f}" if (variant, a) in shortest else "" for a in "FBIW"]
    added = "" if variant == "full" else f"{(whole - full) * 1e6:.0f} us, {(whole / full - 1) * 100:.1f} %"
    print("|", " | ".join([case.name, variant, *cells, added, f"{after_f / 2**20:.3f}", f"{between / 2**20:.3f}"]), "|")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| stage | | F, ms | B | I | W | added | after F, MiB | after I, MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in cases():
        measure(case)


if __name__ == "__main__":
    main()

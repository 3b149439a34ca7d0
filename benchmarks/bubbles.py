"""The share of a pipeline's bubbles that other work uses, and what that costs the training.

    python -m benchmarks.bubbles

Two CPU processes train a chain of two stages with 1F1B and four micro-batches, in turn with pieces and without.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import processes
from lightning_gpp import Options, initialize

WIDTH, LAYERS, SAMPLES, STEPS, ROUNDS = 512, 8, 512, 20, 5


def main() -> None:
    print(processes.load())
    processes.run(2, measured)


def measured(rank: int) -> None:
    torch.manual_seed(0)
    batch = torch.randn(SAMPLES, WIDTH)
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))) for _ in range(2)))
    options = Options(stages={"0": 1, "1": 0}, num_micro_batches=4, schedule="1f1b")
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with initialize(model, torch.optim.SGD(model.parameters(), 0.0), batch, step=loss_of, options=options) as engine:
        bubbles = engine.job.bubbles
        for turn in range(2 * ROUNDS):
            filled = bool(turn % 2)
            if filled:
                bubbles.fill(pieces(), engine.device)
            for _ in range(STEPS):
                dist.barrier()
                start = time.perf_counter()
                engine.train_step(batch)
                seconds[filled].append(time.perf_counter() - start)
            bubbles.end()
    without, with_pieces = map(median, seconds.values())
    times = f"{1e3 * without:.1f} ms without, {1e3 * with_pieces:.1f} ms with pieces ({with_pieces / without - 1:+.1%})"
    print(f"rank {rank}: {times}; {bubbles.number} in {bubbles.used / bubbles.waited:.0%} of the waits", flush=True)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def pieces() -> Iterator[None]:
    """Pieces of about half a millisecond."""
    vectors, matrix = torch.randn(32, WIDTH), torch.randn(WIDTH, WIDTH)
    while True:
        vectors = (vectors @ matrix).tanh()
        yield


if __name__ == "__main__":
    main()

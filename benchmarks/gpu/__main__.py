"""Checks and measures the library on the devices of this machine, and writes one report.

    python -m benchmarks.gpu [--output report.md] [--folder traces]

On a machine with GPUs: with several, one process for each over NCCL; on a single one, several processes over gloo
through host memory, and all stages in one process. Without a GPU: what can be checked on CPUs. The report says what has
not been run.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import beside_torch, parts
from benchmarks.gpu.features import FEATURES, lacks_fsdp
from benchmarks.gpu.seats import NCCL, SEATINGS, Outcome, Seating, here, machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="file for the report; printed in any case")
    parser.add_argument("--folder", help="folder for the traces of torch.profiler; dropped by default")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as dropped:
        folder = arguments.folder or dropped
        Path(folder).mkdir(parents=True, exist_ok=True)
        lines = []
        for line in report(here(), folder):
            print(line, flush=True)
            lines.append(line)
    if arguments.output:
        Path(arguments.output).write_text("\n".join(lines) + "\n")


def report(seatings: Sequence[Seating], folder: str) -> Iterator[str]:
    """The lines of the report, as they are known."""
    yield "# On GPUs\n"
    yield "The report of `make gpu` (`python -m benchmarks.gpu --output benchmarks/results/gpu.md`) on this machine:"
    yield f"{machine()}. `--folder` keeps the traces.\n"
    yield from coverage(seatings)
    together = [seating for seating in seatings if seating.world_size > 1]
    yield from correctness(seatings)
    yield from features(seatings)
    yield from predictions(seatings)
    yield from eager([seating for seating in seatings if seating.world_size == 1])
    yield from beside(together)
    yield from sharded(together)
    yield from traces(seatings, folder)


def coverage(seatings: Sequence[Seating]) -> Iterator[str]:
    missing = [seating for seating in SEATINGS if seating not in seatings]
    yield "**Has been run:** " + "; ".join(seating.name for seating in seatings) + ".\n"
    yield "**Has not been run:** " + "; ".join(seating.name for seating in missing) + ".\n"
    if not any(seating.on_gpu for seating in seatings):
        yield NOTHING_ON_GPUS + "\n"
    elif NCCL not in seatings:
        yield "**NCCL has not been run between GPUs**, because this machine has one.\n"


NOTHING_ON_GPUS = """No line of this library has run on a GPU for this report: neither kernels of CUDA, nor NCCL, nor
copies between host and device, nor `torch.cuda.max_memory_allocated`. What follows shows that the same commands and
programs work on CPUs; it says nothing about speed on GPUs."""


def correctness(seatings: Sequence[Seating]) -> Iterator[str]:
    yield "## Correctness\n"
    yield "Largest errors of one step against the undivided model on the same device over the same micro-batches: the"
    yield "loss, relative; gradients, relative to the largest of the parameter.\n"
    rows = []
    for seating in seatings:
        calls = [partial(parts.correctness, arithmetic=arithmetic) for arithmetic in parts.ARITHMETICS]
        for arithmetic, outcome in zip(parts.ARITHMETICS, seating.run_each(calls), strict=True):
            found, allowed = _found(outcome), arithmetic.tolerance
            loss, gradient = (max(column) for column in zip(*found, strict=True))
            rows.append([seating.name, arithmetic.name, f"{loss:.1e}", f"{gradient:.1e}", f"{allowed:.0e}"])
            rows[-1].append("yes" if max(loss, gradient) <= allowed else "**NO**")
    yield from table("processes | numbers | loss | gradients | allowed | within", rows)


def _found(outcome: Outcome) -> list[Any]:
    results, error = outcome
    if error is not None:
        raise error
    return results


def features(seatings: Sequence[Seating]) -> Iterator[str]:
    yield "## Features\n"
    yield "What runs other code on a GPU: random streams, fused kernels, copies to the host, collectives. The largest"
    yield "error of a step, as above, or a number that has to be zero. A self-check that refuses the model counts as an"
    yield "error, too.\n"
    rows = []
    for seating in seatings:
        there = [feature for feature in FEATURES if seating.world_size > 1 or not feature.together]
        missing = {feature.name: feature.lacks(seating.device(0)) for feature in there}
        rows += [[seating.name, name, why, "", "not run"] for name, why in missing.items() if why]
        tried = [feature for feature in there if not missing[feature.name]]
        for feature, (errors, raised) in zip(tried, seating.run_each([f.error for f in tried]), strict=True):
            shown = f"{max(errors):.1e}" if raised is None else f"`{str(raised).strip().splitlines()[-1]}`"
            fine = raised is None and max(errors) <= feature.allowed
            rows.append([seating.name, feature.name, shown, f"{feature.allowed:.0e}", "yes" if fine else "**NO**"])
    yield from table("processes | feature | error | allowed | within", rows)


def predictions(seatings: Sequence[Seating]) -> Iterator[str]:
    yield "## Predicted and measured\n"
    yield "Towers of transformer layers: a step without the optimizer, from measured costs (`costs=measured`), and the"
    yield "peak of the memory of a rank in a complete step: allocated on a GPU; of live tensors, counted, on a CPU."
    yield "The prediction leaves out temporary results, and tensors on their way between stages.\n"
    rows = []
    for seating in seatings:
        for rank, found in enumerate(seating.run(parts.predictions)):
            rows.append([seating.name, str(rank), *_compared(*found["seconds"], 1e3)])
            rows[-1] += _compared(*found["bytes"], 1e-6)
    header = "processes | rank | predicted, ms | measured, ms | error | predicted, MB | held, MB | error"
    yield from table(header, rows)


def _compared(predicted: float, measured: float, scale: float) -> list[str]:
    if math.isnan(measured):
        return [f"{predicted * scale:.1f}", "-", "-"]
    return [f"{predicted * scale:.1f}", f"{measured * scale:.1f}", f"{predicted / measured - 1:+.1%}"]


def eager(seatings: Sequence[Seating]) -> Iterator[str]:
    yield "## Stages against the undivided model\n"
    yield "Forwards and backwards of three stages in one process, medians of runs in turn. The undivided model computes"
    yield "the same micro-batches, and the whole mini-batch at once: what smaller kernels cost is not the library's."
    yield f"Times are per step, of {parts.STEPS} steps in a row before the loss of the last one is read: what the"
    yield "library does before the first kernel of a step is hidden behind the kernels of the step before. The last"
    yield "column is for a step alone, whose loss is read, so that it is not hidden.\n"
    rows = []
    for seating in seatings:
        sizes = [(tiny, count, graphs) for tiny, count in SIZES for graphs in (False, True)[: 1 + seating.on_gpu]]
        calls = [partial(parts.eager, tiny=tiny, micro_batches=count, graphs=graphs) for tiny, count, graphs in sizes]
        for (tiny, count, graphs), outcome in zip(sizes, seating.run_each(calls), strict=True):
            (((ours, same, whole), (alone, same_alone, _)),) = _found(outcome)
            row = [seating.name, "tiny" if tiny else "ordinary", str(count), "CUDA graphs" if graphs else ""]
            row += [f"{seconds * 1e3:.2f}" for seconds in (ours, same, whole)]
            row += [f"{ours / same:.3f}", f"{same / whole:.3f}", f"{(ours - same) / (6 * count) * 1e6:.0f}"]
            rows.append([*row, f"{alone / same_alone:.3f}"])
    header = (
        "processes | layers | micro-batches | stages as | stages, ms | same micro-batches undivided, ms | at once, ms"
    )
    ratios = "stages / same micro-batches | same micro-batches / at once | library, us/action"
    ratios += " | a step alone: stages / same micro-batches"
    yield from table(f"{header} | {ratios}", rows)


SIZES = ((True, 1), (True, 8), (False, 1), (False, 4), (False, 16))
"""Tiny or ordinary layers, and numbers of micro-batches."""


def beside(seatings: Sequence[Seating]) -> Iterator[str]:
    yield "## Beside torch.distributed.pipelining\n"
    yield "The same two stages in the first two processes' places, 1F1B, medians of steps in turn. Overhead per action:"
    yield "tiny layers, the step less that of free communication, by forwards and backwards of a rank. Ours is an"
    yield "`Engine` in a plain loop: it also sends the data to the first stage and the loss to all ranks, which"
    yield "`schedule.step` does not.\n"
    rows = []
    for seating in (seating for seating in seatings if seating.world_size == 2):
        calls = [partial(beside_torch.beside, tiny=tiny) for tiny in (True, False)]
        for tiny, outcome in zip((True, False), seating.run_each(calls), strict=True):
            found = _found(outcome)[0]
            row = [seating.name, "tiny" if tiny else "ordinary", f"{found['ours'] * 1e3:.2f}"]
            row.append(f"{found['torch'] * 1e3:.2f}" if "torch" in found else "cannot")
            row.append(f"{found['torch'] / found['ours']:.2f}" if "torch" in found else "")
            libraries = [library for library in ("ours", "torch") if tiny and library in found]
            row.append(", ".join(f"{name} {beside_torch.overhead(found, name) * 1e6:.0f}" for name in libraries))
            rows.append(row)
    yield from table("processes | layers | ours, ms | torch, ms | throughput, ours / torch | overhead, us/action", rows)


def sharded(seatings: Sequence[Seating]) -> Iterator[str]:
    yield "## Sharding\n"
    yield "Replicas of one stage on all processes: a complete step with its collectives.\n"
    rows = []
    for seating in seatings:
        kinds = ["none", "zero1", *(["fsdp"] if not lacks_fsdp(seating.device(0)) else [])]
        outcomes = seating.run_each([partial(parts.sharded, sharding=kind) for kind in kinds])
        seconds = [max(_found(outcome)) for outcome in outcomes]
        rows.append([seating.name, *(f"{value * 1e3:.1f}" for value in seconds)])
        rows[-1] += [f"{seconds[2] / seconds[0]:.2f}"] if len(seconds) == 3 else ["this torch cannot", ""]
    yield from table("processes | none, ms | zero1, ms | fsdp, ms | fsdp / none", rows)


def traces(seatings: Sequence[Seating], folder: str) -> Iterator[str]:
    yield "## Traces\n"
    yield "A profile of one step (torch.profiler): actions that it names, their time on the CPU, and that of kernels.\n"
    rows = []
    for seating in seatings:
        for rank, (count, on_cpu, on_gpu) in enumerate(seating.run(parts.traced, folder=folder)):
            shown = f"{on_gpu / 1e3:.1f}" if seating.on_gpu else "not run"
            rows.append([seating.name, str(rank), str(count), f"{on_cpu / 1e3:.1f}", shown])
    yield from table("processes | rank | actions | CPU, ms | kernels, ms", rows)


def table(header: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {header} |"
    yield "|---" * (header.count("|") + 1) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


if __name__ == "__main__":
    main()

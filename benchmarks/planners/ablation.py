"""What each part of the default search is worth: throughput and time without it, relative to the whole search.

    python -m benchmarks.planners.ablation [parts] [--groups examples paper hard random] [--every 5]

The requests are those of `benchmarks.planners.plans`, and hard ones: models of hundreds of units, scarce memory, slow
links. A part is worth keeping if without it throughput falls by 1 % on the geometric mean, or by 5 % anywhere.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from math import exp, inf, log
from typing import Any, Final
from unittest.mock import patch

from benchmarks.planners.common import table
from benchmarks.planners.paper import BATCH_SIZES, HARDWARE, NUM_DEVICES
from benchmarks.planners.plans import EVALUATIONS, GROUPS, SECONDS, Case, step_seconds
from benchmarks.workloads import graph
from lightning_gpp.cluster import Cluster, preset_cluster
from lightning_gpp.costs.model import Footprint
from lightning_gpp.planning import Request
from lightning_gpp.planning.partitioners.auto import moves, search
from lightning_gpp.planning.problem import partitioner, prediction

Patches = tuple[tuple[Any, str, Any], ...]
"""Attributes of modules and classes, and the values that switch a part off."""


def _nothing(*_: object) -> Iterator[Any]:
    return iter(())


PARTS: Final[Mapping[str, Patches]] = {
    "graphpipe": ((search, "GRAPHPIPE_UNITS", 0),),
    "equal stages": ((search, "variants", _nothing),),
    "second order": ((search, "orders", lambda *given: _ORDERS(*given)[:1]),),
    "slack": ((moves, "may_have_slack", lambda *_: False),),
    "places": ((moves, "_places", _nothing),),
    "moves": ((search, "moves", _nothing),),
    "perturbation": ((search, "PATIENCE", 0),),
    "simplicity": ((search.Search, "simplify", lambda self: None),),
    "runners-up": ((prediction, "NUM_RUNNERS_UP", 0),),
    "climb on programs": ((prediction, "NUM_STARTS", 0),),
}

_ORDERS: Final = search.orders


def hard() -> Iterator[tuple[str, Case]]:
    """Workloads of the paper and others on eight devices with one stage each, and with a part of their memory."""
    for name in ("mmt", "encoder_decoder", "mixture_of_experts", "vision_audio_language", "unet", "candle_uno_8"):
        whole = preset_cluster("pcie_a100", num_nodes=2)
        for share in (1.0, 0.05):
            request = Request(
                cluster=_scarce(whole, share), batch_size=64, max_replicas=1, num_pipelines=1, seconds=SECONDS
            )
            yield f"{name} on {share:g} of the memory", ("auto", graph(name), request)
    batch_size = BATCH_SIZES["mmt"][NUM_DEVICES.index(8)]
    for name, share in (("mmt", 0.12), ("mmt2", 0.1), ("encoder_decoder", 0.25)):
        request = Request(
            cluster=_scarce(HARDWARE.cluster(8), share),
            batch_size=batch_size,
            footprint=Footprint(optimizer="sgd"),
            idle_devices=False,
            seconds=SECONDS,
        )
        yield f"{name} on {share:g} of the paper's memory", ("auto", graph(name), request)


def _scarce(cluster: Cluster, share: float) -> Cluster:
    devices = tuple(replace(device, memory_bytes=share * device.memory_bytes) for device in cluster.devices)
    return replace(cluster, devices=devices)


ALL_GROUPS: Final[Mapping[str, Callable[[], Iterator[tuple[str, Case]]]]] = {**GROUPS, "hard": hard}


def measured(cases: Iterable[tuple[str, Case]], patches: Patches = ()) -> tuple[dict[str, float], float]:
    """The simulated step of every request, infinite without a plan, and the CPU seconds of all searches."""
    began, steps = time.process_time(), dict[str, float]()
    with ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(patch.object(owner, name, value))
        for label, case in cases:
            steps[label] = step_seconds(case) or inf
    return steps, time.process_time() - began


def compared(whole: Mapping[str, float], without: Mapping[str, float]) -> tuple[float, float, str]:
    """Throughput without a part relative to the whole search: geometric mean, least, and the request of the least."""
    ratios = {label: whole[label] / step for label, step in without.items() if whole[label] < inf}
    worst = min(ratios, key=ratios.__getitem__)
    mean = exp(sum(log(max(ratio, 1e-3)) for ratio in ratios.values()) / len(ratios))
    return mean, ratios[worst], worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--groups", nargs="*", default=list(ALL_GROUPS), help=f"of {', '.join(ALL_GROUPS)}")
    parser.add_argument("--every", type=int, default=1, help="take one of so many requests of each group")
    parser.add_argument("--evaluations", type=int, default=2 * EVALUATIONS, help="of all searches for a request")
    options = parser.parse_args()
    partitioner.EVALUATIONS_PER_SECOND = options.evaluations / SECONDS
    cases = [case for name in options.groups for case in islice(ALL_GROUPS[name](), 0, None, options.every)]
    whole, seconds = measured(cases)
    rows = [["nothing", "1.000", "1.000", "", f"{seconds:.0f} s"]]
    for part in options.parts:
        steps, seconds = measured(cases, PARTS[part])
        mean, worst, label = compared(whole, steps)
        rows.append([part, f"{mean:.3f}", f"{worst:.3f}", label, f"{seconds:.0f} s"])
        print(*rows[-1], sep=", ", flush=True)
    print(table(["without", "geometric mean", "worst", "where", "CPU time"], rows))


if __name__ == "__main__":
    main()

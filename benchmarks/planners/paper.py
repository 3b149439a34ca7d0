"""The GraphPipe paper's evaluation (arXiv 2406.17145): its throughputs, and our model of the machine that it ran on.

**Stated:** Summit, four V100 of a node, NVLink and one EDR InfiniBand port per node; float32; synchronous 1F1B;
micro-batch sizes are powers of two; mmt has 128 samples on 8 devices (section 7.3); mini-batches grow with the devices.

**Not stated, calibrated:** the speed of a V100, the cost of calling an operator, the speed and sharing of the network,
whether the samples are in place, and all other mini-batches. They were chosen from a coarse grid by the throughputs of
PipeDream alone (benchmarks/results/planners.md). All other figures that the commands print for this machine
follow from them.
"""

from __future__ import annotations

from typing import Final

from benchmarks.planners.common import Hardware

NUM_DEVICES: Final = (4, 8, 16, 32)

THROUGHPUT: Final[dict[str, dict[str, tuple[float, ...]]]] = {
    "mmt": {"pipedream": (114, 191, 278, 592), "piper": (114, 190, 288, 608), "graphpipe": (129, 242, 358, 980)},
    "dlrm": {"pipedream": (4080, 7220, 9410, 9440), "graphpipe": (4930, 10110, 12220, 13900)},
    "candle_uno": {"pipedream": (11450, 15150, 16890, 17940), "graphpipe": (10550, 18550, 20740, 22280)},
}
"""Samples per second by `NUM_DEVICES`, read off figure 6, accurate to about 5 (mmt), 60 (dlrm) and 80 (candle_uno).

Piper found no strategy for the last two.
"""

HARDWARE: Final = Hardware(flops=40e12, seconds_per_operator=20e-6, network=6.25e9, shared="device", in_place=True)

BATCH_SIZES: Final[dict[str, tuple[int, ...]]] = {
    "mmt": (64, 128, 128, 256),
    "dlrm": (256, 512, 1024, 1024),
    "candle_uno": (512, 1024, 1024, 1024),
}
"""Samples of the mini-batch by `NUM_DEVICES`."""

SAMPLES_PER_DEVICE: Final = {"mmt": 16, "dlrm": 64, "candle_uno": 128}
"""Samples of the mini-batch per device, for measurements of search time."""

LAYERS: Final = {"mmt": 32, "mmt2": 16}
"""`num_pieces` with which units are entire Transformer layers, for Piper: operators have too many downsets."""

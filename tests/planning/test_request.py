"""What may be asked for, and partitioners by name."""

from __future__ import annotations

import pytest

from lightning_gpp.cluster import Cluster, Link
from lightning_gpp.errors import ConfigError
from lightning_gpp.planning import Request, partitioner_names
from lightning_gpp.planning.problem.partitioner import partitioner_of, register_partitioner
from tests.planning import graphs
from tests.planning.drafts import DEVICE

CLUSTER = Cluster.uniform(DEVICE, 2, Link())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "A plan needs a mini-batch of at least 1 sample, got 0"),
        ({"seconds": 0}, "strategy.search_seconds=0; it must be more than 0 seconds"),
        ({"num_micro_batches": 9}, "More micro-batches than samples: strategy.num_micro_batches=9"),
        ({"micro_batch_size": 9}, "strategy.micro_batch_size=9, but a mini-batch has 8 samples"),
        ({"micro_batch_size": 2, "num_micro_batches": 4}, "each follows from the other; give one"),
    ],
)
def test_what_cannot_be_asked_for(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Request(**{"cluster": CLUSTER, "batch_size": 8, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (1, 2, 4, 8)),
        ({"num_micro_batches": 4}, (2,)),
        ({"micro_batch_size": 3}, (3,)),
        ({"batch_size": 1}, (1,)),
        ({"batch_size": 97}, (1, 2, 3, 4, 5, 7, 9, 25, 33, 49, 97)),
    ],
)
def test_sizes_to_choose_from(settings: dict[str, object], sizes: tuple[int, ...]) -> None:
    request = Request(**{"cluster": CLUSTER, "batch_size": 8, **settings})  # type: ignore[arg-type]
    assert request.problem(graphs.chain()).sizes == sizes


def test_sizes_that_all_devices_share_equally() -> None:
    """32 of 480 samples, one for each device, are no number of micro-batches that is tried otherwise."""
    cluster = Cluster.uniform(DEVICE, 32, Link(bytes_per_second=1e9))
    sizes = Request(cluster=cluster, batch_size=480).problem(graphs.chain()).sizes
    assert {32, 96, 160, 480} == {size for size in sizes if size % 32 == 0}


def test_partitioners_by_name() -> None:
    assert {"auto", "edgepipe", "graphpipe", "pipedream", "piper"} <= set(partitioner_names())
    with pytest.raises(ConfigError, match=r"partitioner='best' is not a partitioner. Choose one of: auto, .*register"):
        partitioner_of("best")
    with pytest.raises(ConfigError, match="A partitioner named 'auto' is registered already"):
        register_partitioner("auto")(partitioner_of("auto"))

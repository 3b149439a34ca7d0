"""Profiles in the format of Piper's inputs, with layers like those of its BERT, and of two towers that are joined."""

from __future__ import annotations

from typing import Any

LAYER = ((0.0305, 177e6, 606e6, 354e6), (0.0407, 177e6, 48e6, 912e6))
"""Seconds, bytes of weights, bytes per micro-batch in flight and fixed, keeping activations and recomputing them."""

EMBEDDING = ((0.0011, 201e6, 2e6, 402e6), (0.0014, 201e6, 1e5, 404e6))
HEAD = ((0.0, 15e6, 31e6, 29e6), (0.0, 15e6, 31e6, 29e6))

Modes = tuple[tuple[float, float, float, float], ...]


def transformer(num_layers: int) -> dict[str, Any]:
    """A chain of an embedding, layers and a head."""
    modes = [EMBEDDING, *([LAYER] * num_layers), HEAD]
    return _profile(modes, [(index, index + 1) for index in range(len(modes) - 1)])


def towers(num_towers: int, num_layers: int) -> dict[str, Any]:
    """Chains of layers side by side, all read by one layer and a head."""
    number = num_towers * num_layers
    pairs = [(index, index + 1) for index in range(number) if (index + 1) % num_layers]
    pairs += [(index, number) for index in range(num_layers - 1, number, num_layers)]
    return _profile([LAYER] * (number + 1) + [HEAD], [*pairs, (number, number + 1)])


def _profile(modes: list[Modes], pairs: list[tuple[int, int]]) -> dict[str, Any]:
    edges = [{"sourceId": src, "destId": dst, "communicationCost": 16e6} for src, dst in pairs]
    nodes = [
        {
            "id": index,
            "name": f"layer{index}",
            "TMPCs": {"1": [_mode(index, name, *mode, pairs) for name, mode in zip(NAMES, entry, strict=True)]},
        }
        for index, entry in enumerate(modes)
    ]
    limits = {"maxDevices": 8, "maxMemoryPerDevice": 8e9, "bandwidth": 25e9, "mbsInBatch": 480}
    return {**limits, "nodes": nodes, "edges": edges}


NAMES = ("vanilla", "activation recomp")


def _mode(
    index: int, name: str, seconds: float, weights: float, kept: float, fixed: float, pairs: list[tuple[int, int]]
) -> dict[str, Any]:
    return {
        "id": name,
        "timePerSample": seconds,
        "parameterSize": weights,
        "memoryUsageA": kept,
        "memoryUsageB": fixed,
        "syncTimeFw": {str(src): 0.0 for src, dst in pairs if dst == index},
        "syncTimeBw": {str(dst): 0.0 for src, dst in pairs if src == index},
    }

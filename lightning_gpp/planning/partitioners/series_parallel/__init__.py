"""Series-parallel orders: reads a graph as one, or makes it one by adding order."""

from lightning_gpp.planning.partitioners.series_parallel.convert import (
    Conversion,
    inline_broadcasts,
    make_series_parallel,
)
from lightning_gpp.planning.partitioners.series_parallel.tree import (
    Leaf,
    Parallel,
    Series,
    Tree,
    TreeNode,
    critical_path,
    decompose,
    describe,
    evaluate,
    leaves,
    num_ordered,
    order_of,
    parallel,
    series,
)

__all__ = [
    "Conversion",
    "Leaf",
    "TreeNode",
    "Parallel",
    "Series",
    "Tree",
    "critical_path",
    "decompose",
    "describe",
    "evaluate",
    "inline_broadcasts",
    "leaves",
    "make_series_parallel",
    "num_ordered",
    "order_of",
    "parallel",
    "series",
]

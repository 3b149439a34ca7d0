"""GraphPipe's partitioner: stages as a graph, by a dynamic program over the series-parallel order of the model.

Source: Jeon et al., "GraphPipe: Improving performance and scalability of DNN training with graph pipeline parallelism"
(arXiv 2406.17145, ASPLOS 2025), section 5 and algorithms 1 and 2. Formulas and tables there are images, so the
assumptions made in their place are stated here. The configuration is that of the paper's experiments: one micro-batch
size for all stages, 1F1B by depth.

**Objective.** The least time per sample (TPS) of the slowest stage. A stage of r replicas and micro-batch size b
takes

    ( forward + backward of ceil(b / r) samples  +  transfers ) / b  +  all-reduce / mini-batch

Transfers are affine: every tensor that crosses the stage's border takes a latency, and the bytes of one replica's share
over the bandwidth, in each direction in which it travels. A tensor counts once on its way in and once on its way out. A
neighbour is assumed to have as many replicas: the link is the innermost whose groups have 2r devices, or the outermost.
The all-reduce is a ring over r neighbouring devices. On mixed devices the slowest kind and the smallest memory count.

**Space.** The units are in series-parallel order: a line of parts, each a unit or a fork of lines, and so on. A stage
is

    [the last parts of one branch of the fork before]  +  one or more complete parts of one line, in a row

where the part in brackets may be missing, or be a complete branch. So a complete fork may be part of a stage; or its
lines are divided on their own, except that the stage with the join may contain the tail of one of them. No other stage
spans branches, and no stage reaches into a fork inside a branch. If a fork has more than half as many branches as there
are devices, so that few are left for the rest, the search is repeated with branches in bundles of two, three and four,
by their weight: such a bundle is a fork inside a branch, so it may be a stage. The paper splits parallel branches in
two recursively, which makes bundles, too; it does not say which.

Every unit is in one stage. Replicas are powers of two, no more than micro-batches have samples; all devices are used;
stages with units or tensors that cannot be cut into shares have one replica. A stage has as many micro-batches in
flight as there are stages on the longest path from it to a sink, itself included (at most all of the mini-batch);
weights, gradients, optimizer state and the activations of these micro-batches must fit. If the problem leaves it open,
a stage recomputes its forward if it would not fit otherwise. The stage of the user's step never does.

**Search.** Binary search on the TPS. For a target, a dynamic program from the sinks backwards finds for every part of a
line, given what follows it, the pairs (depth, devices) for which a strategy exists: the fewest micro-batches in flight
at the source, for each number of devices. Fewer are never worse, so this loses nothing. Pairs are the bits of integers
(`solve.Grid`), and a fork is passed once for each depth of what follows it: all its lines end before a stage of that
depth, or one of them continues into it (`solve`).

The target is met to a thousandth (`search.PRECISION`). Micro-batch sizes compete by the simulated step. A size is left
out if its slowest stage alone would take longer than the best step so far, and not refined if its first, coarser
strategy is too slow.

Graphs that are not series-parallel get more order (`series_parallel`). That only narrows the search: plans are
evaluated and run with the model's own edges.
"""

from lightning_gpp.planning.partitioners.graphpipe.search import graphpipe

__all__ = ["graphpipe"]

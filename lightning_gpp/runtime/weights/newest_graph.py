"""Streams of samples that change slowly: no stage remembers the samples whose gradients it waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from lightning_gpp.errors import ScheduleError
from lightning_gpp.runtime.weights.latest import Latest
from lightning_gpp.runtime.weights.policy import register_weights


@register_weights("newest_graph")
class NewestGraph(Latest):
    """PARTIME: a gradient goes back through the graph of the newest sample, whose forward the stage has just computed.

        three stages    stage 0   F2 B0     the gradient of sample 0 goes through the graph of sample 2
                        stage 1   F1 B0     ... of sample 1
                        stage 2   F0 B0     its own

    So a stage holds one graph, whatever its delay, and no old weights. This is not the gradient of any loss: it is near
    that of stashing where successive samples are alike, as frames of a video are, and wrong for shuffled ones. A graph
    serves once: where no forward follows any more, at a flush, the stage passes zeros on and keeps its weights.

    Source: PARTIME (Meloni et al., arXiv 2210.09147), whose stages wait for nothing, as under `strategy.schedule`
    layerpipe, with twice the delays of 1f1b.

    Raises (in `begin`):
        ScheduleError: a stage has several micro-batches per mini-batch.
    """

    newest_graphs: ClassVar[bool] = True
    rewrites: ClassVar[bool] = False  # no update comes between the newest forward and the backward

    def begin(self, before: Callable[[int], int], first: int) -> None:
        super().begin(before, first)
        most = max(map(len, self.weights.micro_batches.values()), default=0)
        if most > 1:
            raise ScheduleError(
                f"strategy.weights=newest_graph keeps one graph per stage, but a mini-batch has {most} micro-batches. "
                "Use strategy.num_micro_batches=1."
            )

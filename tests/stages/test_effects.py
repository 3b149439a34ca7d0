"""What the first run of a step changes is undone, and graphs that saved it stay valid."""

from __future__ import annotations

import torch
from torch import nn

from lightning_gpp.stages.answers import answered
from lightning_gpp.stages.effects import without_effects


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("mean", torch.zeros(3))
        self.calls, self.seen = 0, [1]


def test_attributes_lists_and_buffers_are_as_before() -> None:
    module = Keeping()
    with without_effects([module], ["count"]):
        module.count.add_(1)
        module.count.data.add_(1)
        module.mean = module.mean + 1
        module.calls, module.new = 1, 2
        module.seen.append(2)
    assert not module.count.any()
    assert not module.mean.any()
    assert (module.calls, module.seen, hasattr(module, "new")) == (0, [1], False)


def test_a_graph_that_has_saved_a_buffer_stays_valid() -> None:
    module, weight = Keeping(), torch.ones(3, requires_grad=True)
    result = (weight * module.count).sum()
    with without_effects([module], ["count"]):
        pass
    result.backward()


def test_parts_of_a_container_whose_calls_are_answered_are_called_themselves() -> None:
    net, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(1, 2)
    with answered({"net": net}, lambda *_: "answer"):
        assert net(x) == "answer"
        assert torch.equal(net[:1](x), net[0](x))
    assert torch.equal(net(x), net[0](x).tanh())

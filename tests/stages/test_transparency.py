"""A model cut into stages computes what it computes whole, for everything a capture can get wrong."""

from __future__ import annotations

import pytest
import torch

from lightning_gpp.capture import capture_step
from lightning_gpp.planning import manual
from lightning_gpp.stages import build
from tests.capture import zoo
from tests.stages.inprocess import assert_transparent, chain_of, split_gradients


@pytest.mark.parametrize("kind", zoo.WORKING, ids=lambda kind: kind.__name__)
def test_split_equals_whole_and_capture_changes_nothing(kind: type[zoo.Base]) -> None:
    torch.manual_seed(1)
    module = kind().double()
    before, state = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
    captured = capture_step(module, zoo.batch())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert len(getattr(module, "seen", [])) in (0, 8)  # the list is untouched; a buffer of the same name has 8 entries
    assert_transparent(module, captured, chain_of(captured, kind.stages, 4), zoo.batch())


@pytest.mark.parametrize("stages", [[["a"], ["b", "c"]], [["b"], ["a", "c"]]], ids=str)
def test_the_step_joins_a_tower_of_its_own_stage_with_a_distant_one(stages: list[list[str]]) -> None:
    """The step's code is run where one of the two values is, and the other is not."""
    torch.manual_seed(1)
    module = zoo.SeveralCalls().double()
    captured = capture_step(module, zoo.batch())
    assert_transparent(module, captured, chain_of(captured, stages), zoo.batch())


def test_draws_of_the_step_are_one_draw() -> None:
    """Noise that the network and the loss read is drawn once per micro-batch, and the user's stream is left alone."""
    module = zoo.RandomInputs().double()
    with torch.no_grad():
        for layer in (module.a, module.b):
            layer.weight.copy_(torch.eye(8))
            layer.bias.zero_()
    module.forward = lambda x: module.b(module.a(x))  # the identity, so the loss is the mean square of x
    captured = capture_step(module, zoo.batch())
    plan = chain_of(captured, zoo.RandomInputs.stages, 3)
    state = torch.get_rng_state()
    loss = split_gradients(module, captured, plan, zoo.batch())
    assert torch.equal(state, torch.get_rng_state())
    assert loss == pytest.approx(zoo.batch()["x"].pow(2).mean().item(), rel=1e-12)


def test_checkpointing_survives_the_cut() -> None:
    module = zoo.Checkpointed().double()
    module.log = lambda *_: None
    captured = capture_step(module, zoo.batch())
    split_gradients(module, captured, chain_of(captured, module.stages, 6), zoo.batch())
    assert module.runs == 2  # once forward, once recomputed


def test_side_effects_happen_once_per_micro_batch() -> None:
    module = zoo.ReadsValues().double()
    module.log = lambda *_: None
    captured = capture_step(module, zoo.batch())
    split_gradients(module, captured, chain_of(captured, module.stages, 2), zoo.batch())
    assert len(module.seen) == 3
    assert module.metric.update_count == 3


def test_results_kept_in_a_list_are_there() -> None:
    module = zoo.Keeps().double()
    module.log = lambda *_: None
    captured = capture_step(module, zoo.batch())
    split_gradients(module, captured, chain_of(captured, module.stages, 2), zoo.batch())
    expected = module.c(zoo.batch()["y"])
    torch.testing.assert_close(torch.cat(module.kept).detach(), expected.detach(), rtol=1e-12, atol=1e-14)


def test_a_parameter_of_the_loss_goes_with_the_step() -> None:
    module = zoo.LogitScale().double()
    captured = capture_step(module, zoo.batch())
    plan = manual(captured.graph, {"a": 0, "b": 1}, batch_size=zoo.B)
    assert "scale" in build(captured, plan, module).parameters[plan.step_stage]


def test_towers_stay_independent() -> None:
    module = zoo.SeveralCalls().double()
    captured = capture_step(module, zoo.batch())
    plan = chain_of(captured, module.stages, 2)
    assert set(plan.graph().edges) == {(0, 2), (1, 2)}
    assert plan.depth == 2


def test_tied_weights_have_one_name_in_two_stages() -> None:
    module = zoo.Tied().double()
    captured = capture_step(module, zoo.batch())
    pipeline = build(captured, chain_of(captured, module.stages, 2), module)
    holders = [i for i, names in enumerate(pipeline.parameters) if "a.weight" in names]
    assert holders == [0, 2]
    assert "c.weight" not in {name for names in pipeline.parameters for name in names}

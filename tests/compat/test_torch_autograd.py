"""Every private name of autograd does what the library needs: an upgrade that breaks one fails here first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_gpp._compat.torch import (
    accumulator_of,
    as_result,
    autograd_function_calls,
    check_gradients_by,
    check_gradients_plainly,
    checkpoint_regions,
    graph_is_kept,
    kept_version_counters,
    run_backward,
    saved,
    saved_unread,
    saves_tensors,
    trained_flags,
    will_run,
    with_gradient_hooks,
    without_saved_hooks,
)


class Asked(torch.autograd.Function):
    """Notes facts about the backward that comes to it."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor, node: Any, facts: list[tuple[bool, bool]]) -> Tensor:
        ctx.node, ctx.facts = node, facts
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.facts.append((will_run(ctx.node), graph_is_kept()))
        return None, gradient, None, None


def facts_of_backwards() -> list[tuple[bool, bool]]:
    facts: list[tuple[bool, bool]] = []
    token, x = torch.zeros((), requires_grad=True), torch.ones(2, requires_grad=True)
    result = Asked.apply(token, x, accumulator_of(token), facts).sum()  # type: ignore[no-untyped-call]
    result.backward(retain_graph=True)
    torch.autograd.grad(result, x)
    return facts


def test_accumulator_of() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    assert accumulator_of(leaf).name().endswith("AccumulateGrad")
    assert accumulator_of(leaf) is (leaf * 2).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def test_as_result() -> None:
    leaf = torch.ones(2, requires_grad=True)
    result = as_result(leaf, leaf.shape)
    assert result.data_ptr() == leaf.data_ptr()
    result.mul_(3).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3, 3]


def test_will_run() -> None:
    assert [wanted for wanted, _ in facts_of_backwards()] == [True, False]


def test_graph_is_kept() -> None:
    assert [kept for _, kept in facts_of_backwards()] == [True, False]


def scaled_step(agree: Callable[[Any], Any]) -> tuple[torch.amp.GradScaler, Tensor]:
    scaler, weight = torch.amp.GradScaler("cpu", init_scale=8.0), torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    check_gradients_by(scaler, agree)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler, weight.detach()


def hooked(seen: list[Any]) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(seen.append)
    parameter.register_post_accumulate_grad_hook(seen.append)
    return parameter


def test_with_gradient_hooks() -> None:
    plain, parameter = nn.Parameter(torch.ones(2)), hooked([])
    assert [id(each) for each in with_gradient_hooks([plain, parameter])] == [id(parameter)]


def test_check_gradients_by() -> None:
    scaler, weight = scaled_step(lambda found: {torch.device("cpu"): torch.ones(1)})
    assert (scaler.get_scale(), weight.tolist()) == (4.0, [1, 1]), "another rank found one that is not finite"


def test_check_gradients_plainly() -> None:
    scaler, weight = scaled_step(lambda found: found)
    assert weight.tolist() == [0.5, 0.5]
    check_gradients_plainly(scaler)
    assert "_unscale_grads_" not in vars(scaler)


def test_run_backward() -> None:
    x, weight = torch.randn(3, 2, requires_grad=True), torch.randn(2, requires_grad=True)
    out = x * weight
    run_backward([get_gradient_edge(out)], [torch.ones(3, 2)], [weight])
    assert x.grad is None
    assert weight.grad is not None
    assert torch.equal(weight.grad, x.detach().sum(0))
    run_backward([get_gradient_edge(x + weight)], [torch.ones(3, 2)])
    assert torch.equal(weight.grad, x.detach().sum(0) + 3), "accumulated, and summed over the broadcast dimension"


def test_run_backward_reaches_edges() -> None:
    x = torch.randn(2, requires_grad=True)
    middle = x * 2
    arrived: list[Tensor] = []
    edge = get_gradient_edge(middle)
    edge.node.register_prehook(lambda gradients: arrived.append(gradients[0]))
    run_backward([get_gradient_edge(middle * 3)], [torch.ones(2)], [GradientEdge(edge.node, 0)])
    assert x.grad is None
    assert [gradient.tolist() for gradient in arrived] == [[3, 3]]


def product() -> tuple[Tensor, Tensor, Any]:
    first, second = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    return first, second, torch.addmm(torch.zeros(4), first, second.t()).grad_fn


def test_saved() -> None:
    first, second, node = product()
    assert torch.equal(saved(node, "mat1"), first)
    assert torch.equal(saved(node, "mat2"), second.t())
    assert saved(node, "alpha") == saved(node, "beta") == 1
    assert saved(node, "mat2_sym_sizes") == (3, 4)
    assert saved(node, "mat2_sym_strides") == (1, 3)
    with pytest.raises(AttributeError):
        saved(node, "mat3")


def test_saved_of_convolutions() -> None:
    image, convolution = torch.randn(1, 2, 5, requires_grad=True), nn.Conv1d(2, 4, 3, stride=2, padding=1, groups=2)
    node = convolution(image).grad_fn
    names = ("bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    settings = [saved(node, name) for name in names]
    gradient = torch.randn_like(convolution(image))
    operands = (saved(node, "input"), saved(node, "weight"))
    every = torch.ops.aten.convolution_backward(gradient, *operands, *settings, [False, True, False])
    convolution(image).backward(gradient)
    assert torch.equal(every[1], convolution.weight.grad)


def test_without_saved_hooks() -> None:
    packed: list[torch.Size] = []

    def forward() -> None:
        torch.ones(2, requires_grad=True).exp()

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor.shape), lambda _: torch.ones(2)):
        with without_saved_hooks():
            forward()
        assert not packed
        forward()
    assert packed == [(2,)]


def test_saved_unread() -> None:
    first, _, node = product()
    assert torch.equal(saved_unread(node, "mat1"), first)
    with saved_tensors_hooks(lambda tensor: "packed", lambda packed: first):
        _, _, node = product()
    assert saved_unread(node, "mat1") == "packed"
    frozen = torch.addmm(torch.zeros(4), first, torch.randn(3, 4)).grad_fn
    assert saved_unread(frozen, "mat1") is None


def test_saves_tensors() -> None:
    first, _, node = product()
    assert saves_tensors(node)
    assert not saves_tensors((first + 1).grad_fn)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_regions(use_reentrant: bool) -> None:
    events: list[str] = []

    def region(x: Tensor) -> Tensor:
        events.append("run")
        return x.sin()

    x = torch.ones(1, requires_grad=True)
    with checkpoint_regions(lambda: events.append("enter"), lambda: events.append("leave")):
        checkpoint(region, x, use_reentrant=use_reentrant).backward()
    assert events == ["enter", "run", "leave"], "without checkpointing nothing runs again"
    checkpoint(region, x, use_reentrant=use_reentrant).backward()
    assert events == ["enter", "run", "leave", "run", "run"]


def test_autograd_function_calls() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    calls: list[type] = []

    def handler(cls: type, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        calls.append(cls)
        return apply(*args, **kwargs)

    with autograd_function_calls(handler):
        assert Double.apply(torch.ones(1)).item() == 2
    Double.apply(torch.ones(1))
    assert calls == [Double]


def test_kept_version_counters() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    product = weight * weight
    with kept_version_counters([weight]), torch.no_grad():
        weight.add_(1.0)
    product.backward()
    assert weight.grad is not None
    assert weight.grad.item() == 6.0  # of the new value: autograd did not notice
    product = weight * weight
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_trained_flags() -> None:
    with torch.device("meta"):
        foreign = nn.Linear(2, 1)
    foreign.bias.requires_grad_(False)
    assert trained_flags(foreign.parameters()) == b"\1\0"

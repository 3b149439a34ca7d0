"""The split backward equals the full backward bit for bit, and does nothing twice."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from lightning_gpp.errors import GPPError
from lightning_gpp.runtime.split import SplitBackward, Splitter
from lightning_gpp.runtime.split_plan import follow, node_of, walk

ORDERS = ("I0 W0 I1 W1 I2 W2", "I0 I1 W0 I2 W1 W2", "I0 I1 I2 W0 W1 W2")
Inputs = Callable[[], dict[str, Tensor]]
Outcome = tuple[list[dict[str, Tensor | None]], dict[str, Tensor | None]]


class Work:
    """One micro-batch on its way through a stage."""

    def __init__(self, module: nn.Module, inputs: dict[str, Tensor], split: SplitBackward | None) -> None:
        self.split = split
        self.leaves = {n: x.clone().requires_grad_() for n, x in inputs.items() if x.is_floating_point()}
        values = {**inputs, **self.leaves}
        outputs = module(**values)
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        outputs = [output for output in outputs if output.requires_grad]
        self.seeds = [torch.randn_like(output) for output in outputs]
        self.roots = [get_gradient_edge(output) for output in outputs]

    def backward(self) -> None:
        torch.autograd.backward(self.roots, self.seeds)

    def input_gradients(self) -> None:
        assert self.split is not None
        self.split.input_gradients(self.roots, self.seeds, self.leaves)
        del self.roots, self.seeds

    def weight_gradients(self) -> None:
        assert self.split is not None
        self.split.weight_gradients()


def run(module: nn.Module, inputs: Inputs, order: str, splitter: Splitter | None) -> Outcome:
    torch.manual_seed(1)
    works = [Work(module, inputs(), None if splitter is None else SplitBackward(splitter)) for _ in range(3)]
    for step in order.split():
        work = works[int(step[1])]
        if splitter is None:
            if step[0] == "I":
                work.backward()
        elif step[0] == "I":
            work.input_gradients()
        else:
            work.weight_gradients()
    leaves = [{name: leaf.grad for name, leaf in work.leaves.items()} for work in works]
    return leaves, {name: parameter.grad for name, parameter in module.named_parameters()}


def same(ours: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert ours is not None
        assert torch.equal(ours, expected)
    elif expected is None:
        assert ours is None
    else:
        assert len(ours) == len(expected)
        keys = expected if isinstance(expected, dict) else range(len(expected))
        for key in keys:
            same(ours[key], expected[key])


def check(module: nn.Module, inputs: Inputs, *, steps: int = 2) -> Splitter:
    """Over several mini-batches: what was learned in the first is used in the second."""
    for order in ORDERS:
        plain, split = copy.deepcopy(module), copy.deepcopy(module)
        splitter = Splitter()
        for _ in range(steps):
            expected = run(plain, inputs, order, None)
            same(run(split, inputs, order, splitter), expected)
    return splitter


def deferred(module: nn.Module, inputs: Inputs) -> set[str]:
    """The parameters whose gradients come in W."""
    module, splitter = copy.deepcopy(module), Splitter()
    for _ in range(2):
        module.zero_grad()
        work = Work(module, inputs(), SplitBackward(splitter))
        work.input_gradients()
        early = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
        work.weight_gradients()
    return {name for name, parameter in module.named_parameters() if parameter.grad is not None} - early


def normal(*shape: int) -> Inputs:
    return lambda: {"input": torch.randn(*shape)}


def mlp(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))


def block(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, **options)


class Call(nn.Module):
    """A stage that is a function of its submodules and inputs."""

    def __init__(self, function: Callable[..., Any], **members: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, **values: Tensor) -> Any:
        return self.function(self, **values)


def renamed(module: nn.Module) -> Call:
    return Call(lambda self, input: self.module(input), module=module)


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_block(norm_first: bool) -> None:
    module = renamed(block(norm_first=norm_first))
    assert check(module, normal(2, 5, 8)).splits
    early = {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "self_attn.in_proj_bias"}
    names = {name for name, _ in module.module.named_parameters()}
    assert deferred(module, normal(2, 5, 8)) == {f"module.{name}" for name in names - early}


def test_source_stage_does_everything_at_once() -> None:
    module = Call(lambda self, tokens: self.head(self.embedding(tokens)), embedding=nn.Embedding(9, 8), head=mlp())
    inputs: Inputs = lambda: {"tokens": torch.randint(9, (2, 5))}  # noqa: E731
    assert check(module, inputs).splits
    assert deferred(module, inputs) == set()


def test_work_beside_the_path_waits() -> None:
    """A tower that no other stage waits for. Its last norm runs in I, behind which the graph is cut."""
    module = Call(
        lambda self, input, tokens: self.head(input + self.tower(self.embedding(tokens))),
        embedding=nn.Embedding(9, 8),
        tower=nn.Sequential(mlp(), nn.LayerNorm(8)),
        head=nn.Linear(8, 8),
    )
    inputs: Inputs = lambda: {"input": torch.randn(3, 8), "tokens": torch.randint(9, (3,))}  # noqa: E731
    check(module, inputs)
    assert deferred(module, inputs) == {n for n, _ in module.named_parameters()} - {"tower.1.weight", "tower.1.bias"}


def test_hooks_where_the_graph_is_cut_act_once() -> None:
    def forward(self: Any, input: Tensor) -> Tensor:
        beside = self.tower(self.data).view(3, 8)
        beside.register_hook(lambda gradient: gradient * 3)
        return self.last(input + beside)

    module = Call(forward, tower=mlp(), last=nn.Linear(8, 8))
    module.register_buffer("data", torch.randn(3, 8))
    check(module, normal(3, 8))
    assert len(deferred(module, normal(3, 8))) == 6


def test_weight_used_at_several_depths_waits() -> None:
    def forward(self: Any, input: Tensor) -> Tensor:
        for _ in range(4):
            input = self.last(self.shared(input))
        return input

    module = Call(forward, shared=mlp(), last=nn.Linear(8, 8))
    check(module, normal(3, 8))
    assert deferred(module, normal(3, 8)) == {name for name, _ in module.named_parameters()}


def test_outputs_of_all_kinds() -> None:
    """An input that leaves as it came, an output without inputs, one that shares work, a parameter as an output."""

    def forward(self: Any, a: Tensor, b: Tensor) -> list[Tensor]:
        hidden = self.net(a)
        table = self.net(self.data)
        return [b, hidden, hidden.relu() * b, self.free(self.data), table, self.weight, *hidden.chunk(2)]

    module = Call(forward, net=mlp(), free=mlp(), weight=nn.Parameter(torch.randn(3)))
    module.register_buffer("data", torch.randn(4, 8))
    inputs: Inputs = lambda: {"a": torch.randn(4, 8), "b": torch.randn(4, 8)}  # noqa: E731
    check(module, inputs)
    assert deferred(module, inputs) >= {"free.0.weight", "free.2.bias"}


def test_autocast() -> None:
    def forward(self: Any, input: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.module(input)

    module = Call(forward, module=block(norm_first=True))
    check(module, normal(2, 5, 8))
    assert len(deferred(module, normal(2, 5, 8))) == 7


class Fused(torch.autograd.Function):
    """x @ w with both gradients at once."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        Fused.calls += 1
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


def test_a_function_runs_once() -> None:
    module = Call(
        lambda self, input: self.last(Fused.apply(input, self.weight) + Fused.apply(self.data, self.weight * 2)),
        weight=nn.Parameter(torch.randn(8, 8)),
        last=mlp(),
    )
    module.register_buffer("data", torch.randn(3, 8))
    check(module, normal(3, 8))
    Fused.calls = 0
    assert len(deferred(module, normal(3, 8))) == 4
    assert Fused.calls == 4  # two in each of two micro-batches


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks for it
def test_compiled_region() -> None:
    inner = torch.compile(mlp(), backend="aot_eager")
    module = Call(lambda self, input: inner(self.first(input)), first=nn.Linear(8, 8), inner=inner)
    splitter = Splitter()
    expected = run(module, normal(3, 8), ORDERS[1], None)
    for _ in range(2):
        module.zero_grad()
        same(run(module, normal(3, 8), ORDERS[1], splitter), expected)
    assert splitter.splits


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_recomputed_once(reentrant: bool) -> None:
    calls = []

    def forward(self: Any, input: Tensor) -> Tensor:
        return self.last(checkpoint(counted, self.net, input, use_reentrant=reentrant))

    def counted(net: nn.Module, input: Tensor) -> Tensor:
        calls.append(1)
        return net(input)

    module = Call(forward, net=nn.Sequential(block(), block()), last=nn.Linear(8, 8))
    splitter = check(module, normal(2, 5, 8))
    assert splitter.splits == (not reentrant)
    if reentrant:
        assert "reentrant activation checkpoints" in str(splitter.reason)
    calls.clear()
    run(module, normal(2, 5, 8), ORDERS[1], Splitter())
    assert len(calls) == 6  # a forward and a recomputation of three micro-batches
    assert deferred(module, normal(2, 5, 8)) == (set() if reentrant else {"last.weight", "last.bias"})


def test_hooks_on_parameters_fire_once() -> None:
    counts: dict[str, list[int]] = {}

    def observed(module: nn.Module) -> nn.Module:
        for name, parameter in module.named_parameters():
            count = counts[name] = [0, 0]
            parameter.register_hook(lambda gradient, count=count: add(count, 0, gradient * 2))
            parameter.register_post_accumulate_grad_hook(lambda _, count=count: add(count, 1))
        return module

    def add(count: list[int], index: int, result: Tensor | None = None) -> Tensor | None:
        count[index] += 1
        return result

    def shared() -> nn.Module:
        torch.manual_seed(0)
        return renamed(nn.Sequential(block(), (net := mlp()), nn.LayerNorm(8), net))

    expected = run(observed(shared()), normal(2, 5, 8), ORDERS[1], None)
    same(run(observed(shared()), normal(2, 5, 8), ORDERS[1], Splitter()), expected)
    assert set(map(tuple, counts.values())) == {(3, 3)}


def test_hooks_on_intermediate_tensors_act_once() -> None:
    def forward(self: Any, input: Tensor) -> Tensor:
        hidden = self.first(input)
        hidden.register_hook(lambda gradient: gradient * 3)
        return self.last(hidden.relu())

    check(Call(forward, first=nn.Linear(8, 8), last=nn.Linear(8, 8)), normal(3, 8))


def test_a_graph_that_changes() -> None:
    """Layers come and go, sizes change, checkpoints are switched on late: nothing learned before may do harm."""
    state = {"calls": 0}

    def forward(self: Any, input: Tensor) -> Tensor:
        state["calls"] += 1
        number = state["calls"]
        net = self.nets[number % 2]
        hidden = net(input) if number % 3 else net(input[:1])
        if number < 20:
            return hidden * hidden.sin() if number % 5 else hidden
        return checkpoint(self.nets[2], hidden, use_reentrant=False) * hidden.sin()

    module = Call(forward, nets=nn.ModuleList([block(), nn.Sequential(mlp(), nn.LayerNorm(8)), mlp()]))
    plain, split, splitter = copy.deepcopy(module), copy.deepcopy(module), Splitter()
    for step in range(10):
        state["calls"] = step * 3
        expected = run(plain, normal(2, 5, 8), ORDERS[step % 3], None)
        state["calls"] = step * 3
        same(run(split, normal(2, 5, 8), ORDERS[step % 3], splitter), expected)


class Tracked(torch.autograd.Function):
    """sin, which knows how many of the tensors that it saved live."""

    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        cosine = x.cos()
        Tracked.alive.add(cosine.untyped_storage())
        ctx.save_for_backward(cosine)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.saved_tensors[0] * gradient


def test_input_gradients_free_what_weight_gradients_do_not_need() -> None:
    def forward(self: Any, input: Tensor) -> Tensor:
        return self.b(Tracked.apply(self.a(Tracked.apply(input))))

    module, splitter = Call(forward, a=mlp(), b=mlp()), Splitter()
    for _ in range(2):
        work = Work(module, {"input": torch.randn(3, 8)}, SplitBackward(splitter))
        assert len(Tracked.alive) == 2
        work.input_gradients()
        assert len(Tracked.alive) == 0
        work.weight_gradients()


class Marker:
    """Lives as long as what it lies in."""


@pytest.mark.parametrize("ends", [True, False])
def test_nothing_stays(ends: bool) -> None:
    """The graph goes with I, gradients and operands with W or `clear`: without help of the garbage collector."""
    module, splitter = renamed(mlp()), Splitter()
    gc.disable()
    try:
        for _ in range(3):
            split = SplitBackward(splitter)
            work = Work(module, {"input": torch.randn(3, 8)}, split)
            marker = work.roots[0].node.metadata["marker"] = Marker()
            graph, seed = weakref.ref(marker), weakref.ref(work.seeds[0].untyped_storage())
            del marker
            work.input_gradients()
            assert graph() is None
            assert seed() is not None
            split.weight_gradients() if ends else split.clear()
            assert seed() is None
    finally:
        gc.enable()
    split.weight_gradients()
    assert (module.module[0].weight.grad is not None) == ends


def test_an_operand_that_changed_in_place_is_found() -> None:
    work = Work(mlp(), {"input": torch.randn(3, 8)}, SplitBackward(Splitter()))
    work.input_gradients()
    work.leaves["input"].detach().add_(1)
    with pytest.raises(GPPError, match=r"modified by an inplace operation: .* \(3, 8\) is at version 1; expected"):
        work.weight_gradients()


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("groups", "stride", "padding"), [(1, 1, 0), (2, 2, 1), (4, 1, "same")])
def test_convolutions(transposed: bool, groups: int, stride: int, padding: Any) -> None:
    if transposed:
        module: nn.Module = nn.ConvTranspose2d(4, 4, 3, groups=groups, stride=stride, padding=stride - 1)
    else:
        module = nn.Conv2d(4, 8, 3, groups=groups, stride=stride, padding=padding, bias=groups > 1)
    check(module, normal(2, 4, 7, 7))
    assert "weight" in deferred(module, normal(2, 4, 7, 7))


@pytest.mark.parametrize("by_columns", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("summand", [None, (5,), (3, 1), (3, 5)])
def test_products_of_matrices(by_columns: bool, batched: bool, summand: tuple[int, ...] | None) -> None:
    """The parameter on either side, in either layout, and the summand broadcast in every way."""

    def forward(self: Any, input: Tensor) -> list[Tensor]:
        matrices = [self.right.mT, self.left.mT] if by_columns else [self.right, self.left]
        input, right, left = [x[None] if batched else x for x in (input, *matrices)]
        if summand is None:
            return [input @ right, left @ input]
        add = torch.baddbmm if batched else torch.addmm
        return [add(self.summand, input, right), left @ input]

    turned = (5, 8) if by_columns else (8, 5)
    members = {"right": torch.randn(turned), "left": torch.randn(3, 3), "summand": torch.randn(summand or (1,))}
    module = Call(forward, **{name: nn.Parameter(value) for name, value in members.items()})
    check(module, normal(3, 8))
    assert deferred(module, normal(3, 8)) == {"right", "left"} | ({"summand"} if summand else set())


OPERATORS: list[Callable[..., Tensor]] = [
    lambda a, b: a @ b,
    lambda a, b: a.t() @ b,
    lambda a, b: torch.addmm(a[0], a, b),
    lambda a, b: torch.bmm(a[None], b[None])[0],
    lambda a, b: F.conv1d(a[None], b.unflatten(1, (4, 1)), a[:, 0])[0, :, :1].expand(4, 4),
    lambda a, b: a * b,
    lambda a, b: a + b.view(16).view(4, 4),
    lambda a, b: F.layer_norm(a, (4,), b[0], a[1]),
    lambda a, b: torch.stack([a.unbind()[1], *b.unbind()[:3]]),
    lambda a, b: Fused.apply(a, b),
    lambda a, b: checkpoint(torch.addmm, a, b, a, use_reentrant=False),
    lambda a, b: a.tanh(),
]
INDICES = st.integers(0, 30)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    program=st.lists(st.tuples(st.sampled_from(OPERATORS), INDICES, INDICES), min_size=1, max_size=12),
    outputs=st.lists(INDICES, min_size=1, max_size=4),
)
def test_any_graph(program: list[tuple[Callable[..., Tensor], int, int]], outputs: list[int]) -> None:
    """Two inputs, three parameters and data meet in all ways; every parameter's hook fires as often as in one go."""

    def forward(self: Any, a: Tensor, b: Tensor) -> list[Tensor]:
        values = [a, b, self.first, self.second, self.third, self.data]
        for operator, left, right in program:
            result = operator(values[left % len(values)], values[right % len(values)])
            values.append(result / (1 + result.detach().abs().max()))
        return [values[-1 - index % len(values)] for index in outputs]

    def counted(module: nn.Module, counts: dict[str, int]) -> nn.Module:
        for name, parameter in module.named_parameters():
            counts[name] = 0
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: counts.update({name: counts[name] + 1}))
        return module

    torch.manual_seed(0)
    module = Call(forward, **{name: nn.Parameter(torch.randn(4, 4)) for name in ("first", "second", "third")})
    module.register_buffer("data", torch.randn(4, 4))
    inputs: Inputs = lambda: {"a": torch.randn(4, 4), "b": torch.randn(4, 4)}  # noqa: E731
    expected_counts: dict[str, int] = {}
    counts: dict[str, int] = {}
    plain, split = counted(copy.deepcopy(module), expected_counts), counted(copy.deepcopy(module), counts)
    splitter = Splitter()
    for order in ORDERS[1:]:
        same(run(split, inputs, order, splitter), run(plain, inputs, order, None))
    assert counts == expected_counts


PROGRAM = st.lists(st.tuples(st.sampled_from(OPERATORS), INDICES, INDICES), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(first=PROGRAM, second=PROGRAM)
def test_a_graph_is_followed_if_it_has_the_same_structure(first: Any, second: Any) -> None:
    leaves = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    parameter = torch.randn(4, 4, requires_grad=True)

    def roots(program: list[tuple[Callable[..., Tensor], int, int]]) -> list[Any]:
        values = [*leaves, parameter]
        for operator, left, right in program:
            values.append(operator(values[left % len(values)], values[right % len(values)]))
        return [get_gradient_edge(value).node for value in values[-2:]]

    nodes_of_leaves = [node_of(leaf) for leaf in leaves]
    known = walk(roots(first), nodes_of_leaves).signature()
    again, other = roots(first), roots(second)
    assert follow(known, again, leaves) == walk(again, nodes_of_leaves).nodes
    graph = walk(other, nodes_of_leaves)
    assert follow(known, other, leaves) == (graph.nodes if graph.signature() == known else None)

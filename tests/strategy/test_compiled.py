"""Modules that the user compiles by `torch.compile` run compiled in stages, and training gives the same numbers."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_gpp import ConfigError
from lightning_gpp.capture.isolate import private_copy
from lightning_gpp.strategy.checks import check_module
from lightning_gpp.training.sessions import compile_blocks
from tests import distributed
from tests.strategy import harness
from tests.strategy.harness import TwoTowers, loader, make_data
from tests.strategy.test_sharding import fit_two
from tests.strategy.test_training import EXACT, plain

distributed.preload("torch._inductor.compile_fx", "torch._dynamo.repro.after_dynamo")

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch.compile's own

BACKENDS = [
    "aot_eager",
    pytest.param("inductor", marks=[pytest.mark.acceptance, pytest.mark.skipif(not shutil.which("g++"), reason="g++")]),
]

STAGES = [{"modules": ["left", "right"], "devices": [1]}, {"modules": ["head", "@step"], "devices": [0]}]


class Network(nn.Module):
    """torch compiles only what is not its own: nn.Sequential would run as it is."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width_in, 6), nn.Linear(6, width_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Plain(TwoTowers):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.head = Network(4, 6), Network(12, 3)


class InPlace(Plain):
    backend = "aot_eager"

    def __init__(self) -> None:
        super().__init__()
        self.left.compile(backend=self.backend)
        self.head.compile(backend=self.backend)


class Wrapped(Plain):
    backend = "aot_eager"

    def __init__(self) -> None:
        super().__init__()
        self.left = torch.compile(self.left, backend=self.backend)
        self.head = torch.compile(self.head, backend=self.backend)


class Whole(Plain):
    """Compiled whole: the plan cuts through."""

    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="aot_eager")


RUNS: list[tuple[type[Plain], dict[str, Any]]] = [
    (InPlace, {"schedule": "zb_h1"}),
    *((kind, {}) for kind in (Wrapped, Whole)),
]


def fit(kind: type[Plain], strategy: Any, devices: int) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(2)
    module = kind().double()
    harness.trainer(strategy, devices, max_epochs=1).fit(module, loader(16))
    state = {name.replace("_orig_mod.", ""): value for name, value in module.state_dict().items() if not value.is_meta}
    return {"losses": module.losses, "state": state, "compiled": counters["stats"]["unique_graphs"]}


def fit_all(rank: int, backend: str) -> Any:
    InPlace.backend = Wrapped.backend = backend
    runs = [fit(kind, harness.strategy(stages=STAGES, **settings), 2) for kind, settings in RUNS]
    sharded = {name: fit_two(kind, name) for kind, name in ((Plain, "none"), (InPlace, "fsdp"))}
    return runs, sharded


@pytest.fixture(scope="module", params=BACKENDS)
def runs(request: pytest.FixtureRequest) -> list[Any]:
    return harness.run(2, fit_all, request.param)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], **EXACT)
    for name, value in found["state"].items():
        torch.testing.assert_close(value, expected["state"][name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[f"{kind.__name__}-{settings}" for kind, settings in RUNS])
def test_training_gives_the_numbers_of_one_process(runs: list[Any], number: int) -> None:
    expected = plain(fit, Plain, "auto", 1)
    for rank, (found, _) in enumerate(runs):
        same(found[number], expected)
        assert found[number]["compiled"] == (RUNS[number][0] is not Whole), f"rank {rank}"
    assert set().union(*(found[number]["state"] for found, _ in runs)) == set(expected["state"])


def test_replicas_that_split_what_they_hold(runs: list[Any]) -> None:
    for _, sharded in runs:
        same(sharded["fsdp"], sharded["none"])


class Layered(Plain):
    """A tower of three layers of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.right = nn.Sequential(Network(3, 6), *(Network(6, 6) for _ in range(3)))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(a), self.right(b)], dim=1))


def fit_layered(rank: int) -> dict[str, Any]:
    rest = ["right.2", "right.3", "head", "@step"]
    halves = [{"modules": ["left", "right.0", "right.1"], "devices": [1]}, {"modules": rest, "devices": [0]}]
    return fit(Layered, harness.strategy(stages=halves, compile=True), 2)


def test_layers_that_repeat_are_compiled_once() -> None:
    expected = plain(fit, Layered, "auto", 1)
    for found in harness.run(2, fit_layered):
        same(found, expected)
        assert 1 <= found["compiled"] <= 2  # the first layer has another width


def test_a_module_without_layers_that_repeat() -> None:
    with pytest.raises(ConfigError, match=r"(?s)strategy.compile=true .* Plain has none.*self.encoder.compile\(\)"):
        compile_blocks(Plain())


def test_a_compiled_step() -> None:
    module = Plain()
    module.training_step = torch.compile(module.training_step, backend="aot_eager")  # type: ignore[method-assign]
    decorated = torch.compile(Plain.training_step, backend="aot_eager")
    for compiled in (module, type("Plain", (Plain,), {"training_step": decorated})()):
        with pytest.raises(ConfigError, match=r"Plain.training_step is compiled .* for example self.encoder.compile"):
            check_module(compiled, whole=False)


@pytest.mark.parametrize("kind", [InPlace, Wrapped])
def test_copies_compute_with_their_own_parameters(kind: type[Plain]) -> None:
    module = kind().double()
    copied = private_copy(module)
    a, b, _ = make_data(4)[:]
    with torch.compiler.set_stance("force_eager"):
        copied(a, b).sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(parameter.grad is not None for parameter in (*copied.left.parameters(), *copied.head.parameters()))

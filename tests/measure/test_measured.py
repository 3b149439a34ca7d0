"""Measured seconds of blocks become those of operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.cluster import DEVICES
from lightning_gpp.costs.measured import BlockSeconds, MeasuredCosts, OperatorSeconds, fitted, spread
from lightning_gpp.costs.model import Roofline
from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.graph import Affine, Operator, OperatorGraph, TensorSpec

CPU = DEVICES["cpu"]
SECONDS = st.floats(1e-9, 1e3)


def graph(flops: tuple[float, ...] = (1e9, 3e9)) -> OperatorGraph:
    """Data, then a chain of products with a parameter each."""
    made = OperatorGraph(parameter_bytes={"w": 0}, parameter_sizes={"w": 0})
    data = TensorSpec(shape=(Affine(1, 0),), dtype="float32")
    made.add(Operator(name="input0", target="input", module="@source", outputs=(data,)))
    for index, number in enumerate(flops):
        hidden = replace(data, requires_grad=True)
        made.add(
            Operator(
                name=f"op{index}",
                target="mm",
                outputs=(hidden,),
                flops=Affine(number, 0),
                parameters=("w",) * bool(number),
            )
        )
        made.connect(f"op{index - 1}" if index else "input0", f"op{index}", 0)
    return made


def block(*operators: str, **points: tuple[float, float]) -> BlockSeconds:
    return BlockSeconds(operators=operators, points={int(size[1:]): seconds for size, seconds in points.items()})


@given(
    low=SECONDS, high=SECONDS, sizes=st.tuples(st.integers(1, 100), st.integers(1, 100)).filter(lambda s: s[0] < s[1])
)
def test_two_points_are_met_where_that_is_possible(low: float, high: float, sizes: tuple[int, int]) -> None:
    line = fitted({sizes[0]: low, sizes[1]: high})
    assert line.per_sample >= 0
    assert line.fixed >= 0
    if low * 1.0001 < high < low * sizes[1] / sizes[0] * 0.9999:
        assert line.at(sizes[0]) == pytest.approx(low, rel=1e-3)
        assert line.at(sizes[1]) == pytest.approx(high, rel=1e-3)


@given(st.dictionaries(st.integers(1, 64), st.floats(0, 1e3), min_size=1, max_size=6))
def test_no_fit_is_negative(points: dict[int, float]) -> None:
    line = fitted(points)
    assert line.per_sample >= 0
    assert line.fixed >= 0


def test_fits_where_no_line_is_possible() -> None:
    assert fitted({4: 2.0}) == Affine(0.5, 0)
    assert fitted({1: 2.0, 4: 1.0}) == Affine(0, 1.0)
    assert fitted({1: 1.0, 2: 10.0}) == Affine(5.0, 0)
    assert fitted({1: 0.0, 2: 0.0}) == Affine(0, 0)


def test_operators_share_the_seconds_of_their_block() -> None:
    model = graph()
    roofline = Roofline(model)
    measured = block("op0", "op1", s2=(8.0, 6.0), s4=(12.0, 12.0))
    costs = spread(model, [measured], CPU, "here")
    parts = [costs.seconds(model[name], 4, CPU) for name in ("op0", "op1")]
    expected = [roofline.seconds(model[name], 4, CPU) for name in ("op0", "op1")]
    assert sum(part.forward for part in parts) == pytest.approx(12)
    assert sum(part.backward for part in parts) == pytest.approx(12)
    for part, wanted in zip(parts, expected, strict=True):
        assert part.input_gradient * wanted.weight_gradient == pytest.approx(
            wanted.input_gradient * part.weight_gradient
        )
    assert parts[0].forward / parts[1].forward == pytest.approx(expected[0].forward / expected[1].forward)
    assert parts[0].input_gradient == 0  # what comes from the data needs none
    assert costs.name == "here"
    halfway = [costs.seconds(model[name], 3, CPU).forward for name in ("op0", "op1")]
    assert sum(halfway) == pytest.approx(10)


def test_seconds_that_the_model_does_not_expect_are_not_lost() -> None:
    model = graph((1e9, 0))
    frozen = OperatorGraph(parameter_bytes=model.parameter_bytes, parameter_sizes=model.parameter_sizes)
    for operator in model:
        outputs = tuple(replace(spec, requires_grad=False) for spec in operator.outputs)
        frozen.add(replace(operator, outputs=outputs))
    frozen.connect("input0", "op0", 0)
    table = spread(frozen, [block("op0", "op1", s4=(4.0, 3.0))], CPU, "here")
    assert sum(cost.input_gradient.at(4) for cost in table.operators.values()) == pytest.approx(3)


def test_an_operator_of_several_blocks_has_the_mean() -> None:
    model = graph()
    table = spread(model, [block("op0", s1=(1.0, 0.0)), block("op0", s1=(3.0, 0.0))], CPU, "here")
    assert table.operators["op0"].forward.at(1) == 2


def test_costs_of_another_device_are_refused() -> None:
    model = graph()
    costs = MeasuredCosts(name="here", device=CPU.name, operators={"op0": OperatorSeconds()})
    with pytest.raises(ConfigError, match="measured on 'cpu', but the cluster has 'h100_sxm'.*strategy.costs=roofline"):
        costs.seconds(model["op0"], 4, DEVICES["h100_sxm"])


def test_costs_of_another_model_are_refused() -> None:
    costs = MeasuredCosts(name="here", device=CPU.name, operators={})
    with pytest.raises(PlanError, match="no figures for operator 'op1': they were measured for another model"):
        costs.seconds(graph()["op1"], 4, CPU)

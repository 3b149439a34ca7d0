"""Asynchronous training: which weights are used when, bit for bit the same by many processes and by one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_gpp.errors import ConfigError, ScheduleError
from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.runtime import LOSS, MicroBatch
from lightning_gpp.runtime.weights import (
    Weights,
    check_options,
    make_policy,
    options_of,
)
from lightning_gpp.schedules.continuous import continuous_program, delays_of
from tests.runtime.asynchronous import AsyncCase, AsyncOutcome, delayed, run_all
from tests.runtime.stages import make_data, make_stages, slots_of
from tests.strategies import plan_of

CHAIN = plan_of([(0, 1), (1, 2)], [1, 1, 1], 1, data=True)
FIRST_TWO = plan_of([(0, 1)], [1, 1], 1, data=True)
CHAIN_OF_TWO = plan_of([(0, 1), (1, 2)], [1, 1, 1], 2, data=True)
TOWERS = plan_of([(0, 2), (1, 2)], [2, 2, 2], 4, data=True)
SKIP = plan_of([(0, 1), (1, 2), (0, 2)], [2, 2, 2], 2, data=True)
REPLICATED = plan_of([(0, 1)], [2, 2], 4, devices=[(1, 2), (0,)], data=True)
IN_TURNS = replace(REPLICATED, stages=(replace(REPLICATED.stages[0], round_robin=True), REPLICATED.stages[1]))
PAIR = plan_of([(0, 1)], [1, 1], 2, data=True)

POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("stash", {}),
    ("stash", {"vertical_sync": True}),
    ("latest", {}),
    ("corrected", {"rescale_steps": 5}),
    ("corrected", {"rescale_steps": 0, "discrepancy_decay": "window"}),
    ("predicted", {}),
    ("predicted", {"predictor": "decay"}),
    ("predicted", {"passes": 2}),
    ("predicted", {"bellwether": True}),
]


def assert_same(case: AsyncCase, outcomes: list[AsyncOutcome]) -> None:
    """Every weight and loss of the processes is that of one process."""
    alone = delayed(case)
    for outcome in outcomes:
        for name, weight in outcome.weights.items():
            message = f"{case.policy} {case.options} {case.optimizer}: {name}"
            torch.testing.assert_close(weight, alone.weights[name], rtol=1e-12, atol=1e-14, msg=message)
    for step, losses in alone.losses.items():
        found = [loss for outcome in outcomes for loss in outcome.losses.get(step, {}).values()]
        torch.testing.assert_close(sorted(found), sorted(losses.values()), rtol=1e-12, atol=1e-14)


def check_all(cases: list[AsyncCase]) -> None:
    for case, outcomes in zip(cases, run_all(cases), strict=True):
        assert_same(case, outcomes)


def test_processes_equal_one_device_with_the_same_delays() -> None:
    """Every policy on one of the graphs, every graph with two or three policies, accumulation, split backwards, and the
    optimizers for which a prediction has rules; other policies know none."""
    plans = (CHAIN, CHAIN_OF_TWO, TOWERS, SKIP)
    cases = [
        AsyncCase(plan=plans[number % len(plans)], policy=policy, options=options)
        for number, (policy, options) in enumerate(POLICIES)
    ]
    cases += [AsyncCase(plan=CHAIN, policy=name, every=2, segments=(6, 4)) for name in ("double_buffer", "predicted")]
    cases += [AsyncCase(plan=replace(CHAIN_OF_TWO, schedule=name), policy="stash") for name in ("zb_h1", "layerpipe")]
    cases.append(AsyncCase(plan=TOWERS, policy="error_feedback"))
    rules = [("predicted", name) for name in ("rmsprop", "adamw")]
    known = [*rules, ("stash", "adam"), ("corrected", "adamw")]
    cases += [AsyncCase(plan=CHAIN, policy=policy, optimizer=optimizer) for policy, optimizer in known]
    check_all(cases)


def measured(measure: str) -> Plan:
    """Two stages of three recompute, or offload."""
    chosen = (replace(stage, **{measure: index < 2}) for index, stage in enumerate(CHAIN_OF_TWO.stages))
    return replace(CHAIN_OF_TWO, stages=tuple(chosen))


def test_recomputation_and_offload() -> None:
    policies = {"recompute": ("stash", "double_buffer"), "offload": ("stash", "double_buffer", "latest", "predicted")}
    cases = [AsyncCase(plan=measured(measure), policy=policy) for measure in policies for policy in policies[measure]]
    for case, outcomes in zip(cases, run_all(cases), strict=True):
        assert_same(case, outcomes)
        kept = run_like(case, CHAIN_OF_TWO)
        assert all(torch.equal(kept.weights[name], weight) for o in outcomes for name, weight in o.weights.items())


def run_like(case: AsyncCase, plan: Plan) -> AsyncOutcome:
    return delayed(replace(case, plan=plan))


@pytest.mark.parametrize(("plans", "num_pipelines"), [([REPLICATED, IN_TURNS], 1), ([PAIR], 2)])
def test_replicas(plans: list[Plan], num_pipelines: int) -> None:
    """Gradients of two replicas have one sum: one device adds up what each of them collects."""
    policies = ("stash", "corrected", "predicted")
    check_all([AsyncCase(plan=p, policy=name, num_pipelines=num_pipelines) for p in plans for name in policies])


# -- versions ---------------------------------------------------------------------------------------------------------


def versions(case: AsyncCase) -> dict[tuple[int, int], tuple[int, int]]:
    """For every stage and mini-batch of one micro-batch the versions of its forward and of its backward."""
    found: dict[tuple[int, int], dict[str, int]] = {}
    for stage, batch, _, kind, version in delayed(case).log:
        found.setdefault((stage, batch), {})[kind] = version
    return {key: (pair["F"], pair["B"]) for key, pair in found.items()}


def test_stashing_takes_pipedreams_staircase() -> None:
    number = 8
    found = versions(AsyncCase(plan=CHAIN, policy="stash", segments=(number,)))
    for stage in range(3):
        for batch in range(number):
            version = max(batch - (2 - stage), 0)
            assert found[stage, batch] == (version, version)


def test_vertical_sync_takes_the_version_of_the_first_stage() -> None:
    found = versions(AsyncCase(plan=CHAIN, policy="stash", options={"vertical_sync": True}, segments=(8,)))
    assert all(found[stage, batch] == (max(batch - 2, 0),) * 2 for stage in range(3) for batch in range(8))


def test_a_graph_is_as_late_as_it_is_deep() -> None:
    plan = replace(TOWERS, batch_size=2)
    graph = versions(AsyncCase(plan=plan, policy="stash", segments=(6,)))
    chain = versions(AsyncCase(plan=plan.chained(), policy="stash", segments=(6,)))
    assert [graph[stage, 5][0] for stage in range(3)] == [4, 4, 5]
    assert [chain[stage, 5][0] for stage in range(3)] == [3, 4, 5]


def test_double_buffering_is_one_version_late_everywhere() -> None:
    found = versions(AsyncCase(plan=TOWERS, policy="double_buffer", segments=(5, 3)))
    assert all(found[stage, batch] == (max(batch - 1, 0),) * 2 for stage in range(3) for batch in range(8))


@pytest.mark.parametrize(("number", "every"), [(1, 1), (2, 1), (3, 1), (1, 3)])
def test_latest_goes_backward_with_the_newest(number: int, every: int) -> None:
    """PACI: with n in flight, and K micro-batches per update, one crosses at most ceil(n / K) updates."""
    plan, per_update = plan_of([(0, 1), (1, 2)], [1, 1, 1], number, data=True), number * every
    for stage, batch, micro, kind, version in delayed(AsyncCase(plan, "latest", every=every, segments=(6,))).log:
        backwards = batch * number + micro - (2 - stage if kind == "F" else 0)
        assert version == max(backwards, 0) // per_update
    late = [math.ceil(delay / every) for delay in delays_of(continuous_program(plan)).values()]
    assert late == [math.ceil(in_flight / per_update) for in_flight in (2, 1, 0)]


def test_a_flush_after_every_mini_batch_is_synchronous() -> None:
    number = 5
    wanted = plain_loop(CHAIN_OF_TWO, number, late=0)
    cases = [AsyncCase(plan=CHAIN_OF_TWO, policy=p, options=o, segments=(1,) * number) for p, o in POLICIES]
    for case in cases:
        for name, weight in delayed(case).weights.items():
            torch.testing.assert_close(weight, wanted[name], rtol=1e-12, atol=1e-13, msg=f"{case.policy}: {name}")


def test_double_buffering_is_a_plain_loop_with_a_late_gradient() -> None:
    wanted = plain_loop(TOWERS, 8, late=1)
    outcome = delayed(AsyncCase(plan=TOWERS, policy="double_buffer", segments=(5, 3)))
    for name, weight in outcome.weights.items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-12, atol=1e-13)


def plain_loop(plan: Plan, number: int, late: int) -> dict[str, torch.Tensor]:
    """Momentum SGD in one process, with gradients at the weights of `late` updates ago."""
    newest, old = make_stages(plan), make_stages(plan)
    optimizer = torch.optim.SGD([p for stage in newest for p in stage.parameters()], lr=0.02, momentum=0.9)
    history = [[p.detach().clone() for stage in newest for p in stage.parameters()]]
    for batch in range(number):
        for parameter, value in zip(
            (p for s in old for p in s.parameters()), history[max(batch - late, 0)], strict=True
        ):
            parameter.data, parameter.grad = value.clone(), None
        loss_of(plan, old, batch).backward()
        for mine, theirs in zip(newest, old, strict=True):
            for parameter, other in zip(mine.parameters(), theirs.parameters(), strict=True):
                parameter.grad = other.grad
        optimizer.step()
        history.append([p.detach().clone() for stage in newest for p in stage.parameters()])
    return {f"stage{i}.{name}": p.detach() for i, stage in enumerate(newest) for name, p in stage.named_parameters()}


def loss_of(plan: Plan, stages: list[Any], batch: int) -> torch.Tensor:
    data = make_data(plan.batch_size, seed=batch)
    whole = MicroBatch(0, 0, plan.batch_size, plan.batch_size)
    made = {SOURCE: data.inputs(whole)}
    for index, stage in enumerate(stages):
        edges = [edge for edge in plan.edges if edge.dst == index]
        made[index] = stage({s.name: made[edge.src][s.name] for edge in edges for s in slots_of(edge)}, whole)
    return made[len(stages) - 1][LOSS]


# -- the newest graph -------------------------------------------------------------------------------------------------


def test_gradients_go_through_the_newest_graph() -> None:
    """PARTIME, on two and three processes; also with all messages a period later, and a flush in between."""
    plans = [*(replace(CHAIN, schedule=name) for name in ("1f1b", "layerpipe", "zb_h1")), FIRST_TWO]
    cases = [AsyncCase(plan=plan, policy="newest_graph", segments=(7, 3)) for plan in plans]
    outcomes = [*run_all(cases[:3]), *run_all(cases[3:])]
    for case, found in zip(cases, outcomes, strict=True):
        wanted = newest_graph_loop(case)
        for name, weight in (pair for outcome in found for pair in outcome.weights.items()):
            torch.testing.assert_close(weight, wanted[name], rtol=1e-12, atol=1e-14, msg=f"{case.plan.schedule} {name}")


def newest_graph_loop(case: AsyncCase) -> dict[str, torch.Tensor]:
    """Every period each stage computes its next sample, and then the gradients that are due, each graph once."""
    stages, edges = make_stages(case.plan), {edge.dst: edge for edge in case.plan.edges}
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.02, momentum=0.9)
    delays, first, one = delays_of(continuous_program(case.plan)), 0, MicroBatch(0, 0, 1, 1)
    for number in case.segments:
        made = {(-1, sample): make_data(1, seed=first + sample).inputs(one) for sample in range(number)}
        graphs = {stage: (dict[str, torch.Tensor](), dict[str, torch.Tensor]()) for stage in delays}
        for period in range(-delays[0], number):
            for stage, sample in ((stage, period + delay) for stage, delay in delays.items()):
                if 0 <= sample < number:
                    slots, given = slots_of(edges[stage]), made[stage - 1, sample]
                    inputs = {s.name: given[s.name].detach().requires_grad_(s.spec.requires_grad) for s in slots}
                    made[stage, sample] = stages[stage]({name: v.view_as(v) for name, v in inputs.items()}, one)
                    graphs[stage] = inputs, made[stage, sample]
            if period >= 0:
                gradients = {LOSS: torch.ones((), dtype=torch.float64)}
                for stage in reversed(delays):
                    gradients, graphs[stage] = gradients_of(*graphs[stage], gradients), ({}, {})
                optimizer.step()
                optimizer.zero_grad()
        first += number
    return {f"stage{i}.{name}": p.detach() for i, stage in enumerate(stages) for name, p in stage.named_parameters()}


def gradients_of(
    inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The gradients of the inputs, from those that the next stage has for its own; none without a graph."""
    roots = [name for name in gradients if name in outputs and outputs[name].requires_grad]
    if roots:
        torch.autograd.backward([outputs[name] for name in roots], [gradients[name] for name in roots])
    found = {name: value for name, value in inputs.items() if value.requires_grad}
    return {name: torch.zeros_like(v) if v.grad is None else v.grad for name, v in found.items()}


def test_the_newest_graph_takes_one_micro_batch() -> None:
    policy = make_policy("newest_graph", Weights(parameters={}, micro_batches={0: [0, 1]}))
    with pytest.raises(ScheduleError, match=r"a mini-batch has 2 micro-batches.*num_micro_batches=1"):
        policy.begin(int, 0)


# -- memory -----------------------------------------------------------------------------------------------------------


COPIES = {
    "stash": [2, 1, 0],  # one for every version in flight that is not the newest
    "double_buffer": [1, 1, 1],
    "error_feedback": [2, 2, 2],  # and the latest update
    "latest": [0, 0, 0],
    "corrected": [1, 1, 0],  # the velocity, where there is a delay
    "predicted": [0, 0, 0],  # what is written over is kept for the time of a forward
}


def test_copies_of_the_weights() -> None:
    late = ("double_buffer", "error_feedback")
    plans = {policy: CHAIN_OF_TWO if policy in late else CHAIN for policy in COPIES}
    cases = [AsyncCase(plan=plan, policy=policy, segments=(9,)) for policy, plan in plans.items()]
    for case, outcomes in zip(cases, run_all(cases), strict=True):
        found = [outcome.most_bytes / outcome.own_bytes for outcome in reversed(outcomes)]
        assert found == COPIES[case.policy], case.policy


def test_double_buffering_refuses_a_pipeline_that_is_further_ahead() -> None:
    policy = make_policy("double_buffer", Weights(parameters={}, delays={0: 2, 1: 1}))
    with pytest.raises(ScheduleError, match=r"keeps two versions.*2 optimizer steps ahead.*weights=stash"):
        policy.begin(lambda batch: batch, 0)


# -- names ------------------------------------------------------------------------------------------------------------


def test_an_unknown_policy_or_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy.weights='stale' is not a weight policy.*double_buffer"):
        check_options("stale", {})
    with pytest.raises(
        ConfigError, match=r"weight_options has \['sync'\]; strategy.weights=stash knows \['vertical_sync'\]"
    ):
        check_options("stash", {"sync": True})
    with pytest.raises(ConfigError, match=r"predictor='cubic'"):
        make_policy("predicted", Weights(parameters={}), predictor="cubic")
    assert options_of("predicted") == {"predictor": "linear", "passes": 1, "bellwether": False}


def test_an_optimizer_without_a_rule_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adagrad([parameter])
    with pytest.raises(ConfigError, match=r"cannot predict Adagrad.*AdamW, RMSprop, SGD.*strategy.weights=stash"):
        make_policy("predicted", Weights(parameters={0: [parameter]}, optimizers=lambda: [optimizer]))
    plain = torch.optim.SGD([parameter], lr=0.1)
    with pytest.raises(ConfigError, match=r"predicts by momentum, but SGD has none.*weights=stash"):
        make_policy("predicted", Weights(parameters={0: [parameter]}, optimizers=lambda: [plain]))

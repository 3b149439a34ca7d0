"""Weight policies against published theory: largest stable steps of PipeMare, and exactness of weight predictors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from lightning_gpp.runtime.weights import Use, WeightPolicy, Weights, make_policy
from lightning_gpp.runtime.weights.policy import update

# -- largest stable steps ---------------------------------------------------------------------------------------------

STEP = 0.01
"""Relative distance of the steps that are tried."""

TOLERANCE = 2 * STEP
"""Relative error of a first unstable step: one tried step, and as much for growth that a run is too short to show."""


def tried(smallest: float, largest: float) -> Tensor:
    count = math.ceil(math.log(largest / smallest) / math.log1p(STEP))
    return smallest * (1 + STEP) ** torch.arange(count + 1, dtype=torch.float64)


def first_unstable(policy: str, delay: int, mismatch: Sequence[float], **options: Any) -> list[float]:
    """For every mismatch the smallest step at which a quadratic of curvature 1 grows; infinite if none does.

    The gradient is (1 + mismatch) * forward's weight - mismatch * backward's weight. All steps and mismatches are tried
    at once: each is an entry of one parameter, and entries do not know of each other. An unstable entry is larger at
    the end of the run than in the middle; both are windows longer than an oscillation.
    """
    steps = tried(1e-3, 2.1)
    delta = torch.tensor(mismatch, dtype=torch.float64)[:, None]
    number = 200 * (delay + 1)
    weight = nn.Parameter(torch.ones(len(delta), len(steps), dtype=torch.float64))
    values = driven(policy, weight, delay, number, lambda f, b: steps * ((1 + delta) * f - delta * b), **options)
    middle, end = largest(values, delay, number // 2), largest(values, delay, number - number // 2)
    grows = ~(end <= middle)  # also where it is no number any more
    return [float(steps[row][0]) if row.any() else math.inf for row in grows]


def largest(values: Iterator[Tensor], delay: int, number: int) -> Tensor:
    """The largest absolute value of every entry in the last few of the next `number` values."""
    last = deque((value.abs() for value in islice(values, number)), maxlen=10 * (delay + 1))
    return torch.stack([*last]).amax(dim=0)


def driven(
    name: str,
    weight: nn.Parameter,
    delay: int,
    number: int,
    change: Callable[[Tensor, Tensor], Tensor],
    **options: Any,
) -> Iterator[Tensor]:
    """The weight after each mini-batch of a stage whose forwards are `delay` mini-batches ahead of its backwards."""
    policy = make_policy(name, Weights(parameters={0: [weight]}, delays={0: delay}), **options)
    policy.begin(int, 0)
    forwards = deque[Tensor]()
    for batch in range(-delay, number):
        forwards.append(forward(policy, weight, batch + delay))
        if batch >= 0:
            step = change(forwards.popleft(), backward(policy, weight, batch))
            with torch.no_grad(), update(policy, [weight]):
                weight -= step
            yield weight.detach().clone()


def forward(policy: WeightPolicy, weight: nn.Parameter, batch: int) -> Tensor:
    """The weight that a forward computes with."""
    policy.enter_forward(Use(0, batch, 0))
    value = weight.detach().clone()
    policy.leave_forward(Use(0, batch, 0))
    return value


def backward(policy: WeightPolicy, weight: nn.Parameter, batch: int) -> Tensor:
    """The weight that a backward computes with."""
    policy.enter_backward(Use(0, batch, 0, final=True))
    value = weight.detach().clone()
    policy.leave_backward(Use(0, batch, 0, final=True))
    return value


def test_rescaled_steps_are_stable_whatever_the_delay() -> None:
    """PipeMare's T1 divides the step by the delay: the bound becomes 2 tau sin(pi / (4 tau + 2)), about pi / 2."""
    for delay in (5, 10, 20):
        bound = 2 * delay * math.sin(math.pi / (4 * delay + 2))
        found = first_unstable("corrected", delay, [0.0], rescale_steps=10**12, discrepancy_decay=0)
        assert found == [pytest.approx(bound, rel=TOLERANCE)]


def test_rescaling_begins_when_updates_are_late() -> None:
    """PipeMare's T1 after T3: synchronous steps are as long as they are, and do not anneal anything."""
    weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
    policy = make_policy("corrected", Weights(parameters={0: [weight]}), rescale_steps=4, discrepancy_decay=0)
    moved = []
    for first, last, delay in ((0, 1, 0), (1, 2, 0), (2, 9, 2)):
        policy.begin(int, first)
        for batch in range(first - delay, last):
            if first <= batch + delay < last:
                forward(policy, weight, batch + delay)
            if first <= batch:
                moved.append(moved_by(policy, weight, batch))
    assert moved == pytest.approx([1, 1, 1, 1, 2**-0.75, 2**-0.5, 2**-0.25, 1, 1])


def moved_by(policy: WeightPolicy, weight: nn.Parameter, batch: int) -> float:
    """The change that an update by 1 makes."""
    before = backward(policy, weight, batch).item()
    with torch.no_grad(), update(policy, [weight]):
        weight += 1.0
    return weight.item() - before


MISMATCHES = [0.0, 1.0, 5.0, 50.0, -5.0]
TABLE = {
    (10, 0.0): [0.1494, 0.0592, 0.0175, 0.00196, 0.2227],
    (10, 0.01): [0.1494, 0.1591, 0.0846, 0.00884, 0.0292],
    (10, math.exp(-2)): [0.1494, 0.1310, 0.0971, 0.0198, 0.0596],
    (10, 0.7): [0.1494, 0.0670, 0.0220, 0.00268, 0.1498],
}
"""For a delay and a decay D of T2 (0: off) the first unstable step under each mismatch, by the eigenvalues of the
recurrence with its velocity."""


@pytest.mark.parametrize(("delay", "decay"), TABLE)
def test_largest_step_under_a_mismatch_of_forward_and_backward(delay: int, decay: float) -> None:
    """PipeMare's Lemma 2, and T2, which helps positive mismatches and harms negative ones."""
    policy = "corrected" if decay else "latest"
    options = {"rescale_steps": 0, "discrepancy_decay": decay} if decay else {}
    found = first_unstable(policy, delay, MISMATCHES, **options)
    assert found == [pytest.approx(step, rel=TOLERANCE) for step in TABLE[delay, decay]]


@pytest.mark.parametrize("delay", [1, 3])
def test_a_window_corrects_by_the_mean_of_the_last_updates(delay: int) -> None:
    """LayerPipe2's rule, written out; the first update is not late."""
    weight, number = nn.Parameter(torch.ones((), dtype=torch.float64)), 12

    def change(forward: Any, backward: Any) -> Any:
        return 0.3 * forward - 0.2 * backward**2

    found = driven("corrected", weight, delay, number, change, rescale_steps=0, discrepancy_decay="window")
    weights, mean = [1.0], 0.0
    for batch in range(number):
        crossed, earlier = min(batch, delay), min(max(batch - 1, 0), delay)
        update = -change(weights[batch - crossed], weights[batch] - crossed * mean)
        weights.append(weights[batch] + update)
        mean = (earlier * mean + update) / (earlier + 1) if crossed else 0.0
    assert [float(value) for value in found] == pytest.approx(weights[1:], rel=1e-12)


def grows(step: float, coefficient: float) -> bool:
    """True if x' = x - step * ((1 + c) x_1 - c x_2) has a root outside the unit circle; x_n is n updates old."""
    recurrence = [[1, -step * (1 + coefficient), step * coefficient], [1, 0, 0], [0, 1, 0]]
    roots = torch.linalg.eigvals(torch.tensor(recurrence, dtype=torch.float64))
    return bool(roots.abs().max() > 1)


@pytest.mark.parametrize("coefficient", [0.0, 0.5, 1.0])
def test_largest_step_under_error_feedback(coefficient: float) -> None:
    """By the eigenvalues of its recurrence."""
    bound = next(step for step in tried(1e-3, 2.1).tolist() if grows(step, coefficient))
    found = first_unstable("error_feedback", 1, [0.0], coefficient=coefficient)
    assert found == [pytest.approx(bound, rel=TOLERANCE)]


def test_error_feedback_is_on_time_while_updates_change_steadily() -> None:
    """Each update is that of one version ago, 2 + 3 (t - 1); all but the first move the weight by 2 + 3 t."""
    weight, ago = nn.Parameter(torch.zeros((), dtype=torch.float64)), count(-1)
    values = driven("error_feedback", weight, 1, 6, lambda f, b: torch.tensor(-2.0 - 3.0 * next(ago)))
    moved = [after - before for before, after in pairwise([0.0, *map(float, values)])]
    assert moved == pytest.approx([-1, 5, 8, 11, 14, 17])


def test_the_differences_of_error_feedback_cancel() -> None:
    """The weight is that of the sum of all updates, and of the difference from the first to the latest."""
    updates = [3.0, -1.0, 4.0, 1.0, -5.0]
    weight, left = nn.Parameter(torch.zeros((), dtype=torch.float64)), iter(updates)
    *_, last = driven("error_feedback", weight, 1, 5, lambda f, b: torch.tensor(-next(left)), coefficient=0.5)
    assert float(last) == pytest.approx(sum(updates) + 0.5 * (updates[-1] - updates[0]))


# -- predictors -------------------------------------------------------------------------------------------------------

Make = Callable[[list[nn.Parameter]], Optimizer]

CONSTANT: dict[str, Make] = {
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "momentum, maximize": lambda p: SGD(p, lr=0.1, momentum=0.9, maximize=True),
    "adam": lambda p: Adam(p, lr=0.1),
    "amsgrad": lambda p: Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=0.1, weight_decay=0.0),
    "adamw, fused": lambda p: AdamW(p, lr=0.1, weight_decay=0.0, fused=True),
    "rmsprop, momentum": lambda p: RMSprop(p, lr=0.1, momentum=0.9),
}


class Predicting:
    """A parameter, its optimizer, and the policy that predicts it."""

    def __init__(self, make: Make, predictor: str) -> None:
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        self.optimizer = make([self.weight])
        weights = Weights(parameters={0: [self.weight]}, optimizers=lambda: [self.optimizer])
        self.policy = make_policy("predicted", weights, predictor=predictor)
        self.policy.begin(int, 0)

    def train(self, steps: int, gradient: list[float]) -> Tensor:
        """That many updates with one gradient; the weight then."""
        for _ in range(steps):
            self.weight.grad = torch.tensor(gradient, dtype=torch.float64)
            with update(self.policy, [self.weight]):
                self.optimizer.step()
        return self.weight.detach().clone()

    def predicted(self, updates: int) -> Tensor:
        """The weight of a forward whose backward comes after that many updates."""
        return forward(self.policy, self.weight, self.policy.updates + updates)


@pytest.mark.parametrize(("accumulated", "halfway"), [(1, [0, 0, 1, 1]), (2, [0, 0, 0, 1]), (4, [0, 0, 0, 0])])
def test_spectrain_counts_updates(accumulated: int, halfway: list[int]) -> None:
    """The version halfway (SpecTrain, section 3.3) is one of the weights, which mini-batches do not change."""
    weights = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(4)]
    optimizer = SGD(weights, lr=0.1, momentum=0.9)
    known = Weights(
        parameters={stage: [weight] for stage, weight in enumerate(weights)},
        delays={stage: 3 - stage for stage in range(4)},
        accumulated=accumulated,
        optimizers=lambda: [optimizer],
    )
    policy = make_policy("predicted", known, passes=2)
    policy.begin(lambda batch: batch // accumulated, 0)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with update(policy, weights):
        optimizer.step()
    for stage, weight in enumerate(weights):
        policy.enter_backward(Use(stage, accumulated, 0))
        assert weight.item() == pytest.approx(-0.1 * (1 + halfway[stage]))
        policy.leave_backward(Use(stage, accumulated, 0))


@pytest.mark.parametrize("name", CONSTANT)
def test_linear_predictions_are_exact_while_gradients_stay(name: str) -> None:
    model = Predicting(CONSTANT[name], "linear")
    model.train(3000, [0.3, -0.7])  # until moments no longer change
    before = model.weight.detach().clone()
    predicted = {updates: model.predicted(updates) for updates in (1, 3, 7)}
    assert torch.equal(model.weight, before)
    seen = {count: model.train(more, [0.3, -0.7]) for more, count in ((1, 1), (2, 3), (4, 7))}
    torch.testing.assert_close(predicted, seen, rtol=1e-10, atol=0.0)
    assert not torch.equal(seen[7], before)


def test_linear_predictions_leave_decoupled_weight_decay_out() -> None:
    """As PipeOptim does: AdamW is predicted as Adam is."""
    changes = []
    for make in (lambda p: AdamW(p, lr=0.1, weight_decay=0.3), lambda p: Adam(p, lr=0.1)):
        model = Predicting(make, "linear")
        model.train(3, [0.3, -0.7])
        changes.append(model.predicted(4) - model.weight.detach())
    torch.testing.assert_close(changes[0], changes[1], rtol=1e-12, atol=0.0)


VANISHING: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", VANISHING)
def test_decaying_predictions_are_exact_while_gradients_vanish(name: str) -> None:
    model = Predicting(VANISHING[name], "decay")
    model.train(3, [0.3, -0.7])
    predicted = {updates: model.predicted(updates) for updates in (1, 3, 7)}
    seen = {count: model.train(more, [0.0, 0.0]) for more, count in ((1, 1), (2, 3), (4, 7))}
    torch.testing.assert_close(predicted, seen, rtol=1e-12, atol=0.0)


KEEPING: dict[str, Make] = {
    "adam": lambda p: Adam(p, lr=0.1),
    "adamw, fused": lambda p: AdamW(p, lr=0.1, weight_decay=0.3, fused=True),
}


@pytest.mark.parametrize("name", KEEPING)
def test_decaying_predictions_of_adam_keep_the_second_moment(name: str) -> None:
    """Gradients that vanish would shrink it, too; FTPipe assumes that it stays. Decoupled weight decay goes on."""
    model = Predicting(KEEPING[name], "decay")
    model.train(3, [0.3, -0.7])
    predicted = model.predicted(7)
    second = model.optimizer.state[model.weight]["exp_avg_sq"]
    for _ in range(7):
        second /= 0.999  # the step multiplies by this
        model.train(1, [0.0, 0.0])
    torch.testing.assert_close(predicted, model.weight.detach(), rtol=1e-10, atol=0.0)

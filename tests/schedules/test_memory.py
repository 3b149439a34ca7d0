"""One memory model: search, list schedulers and simulation count the same bytes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.graph import Affine
from lightning_gpp.plan import Figures
from lightning_gpp.schedules import Action, Kind
from lightning_gpp.schedules.one_f_one_b import alternating
from lightning_gpp.schedules.work import allocations, peak, warm_up_peak

SIZES = st.integers(0, 1000).map(float)
HELD = st.builds(
    Figures,
    activation_bytes=SIZES.map(Affine),
    working_bytes=SIZES.map(Affine),
    pending_bytes=SIZES.map(Affine),
)


@settings(max_examples=200, deadline=None)
@given(held=HELD, samples=st.integers(1, 8), recomputes=st.booleans())
def test_a_backward_frees_what_its_halves_free(held: Figures, samples: int, recomputes: bool) -> None:
    changes = allocations(held, samples, recomputes=recomputes)
    assert changes[Kind.INPUT] + changes[Kind.WEIGHT] == changes[Kind.BACKWARD]
    allocated = changes[Kind.FORWARD] + (changes[Kind.RECOMPUTE] if recomputes else 0)
    assert allocated + changes[Kind.BACKWARD] == 0


@settings(max_examples=200, deadline=None)
@given(held=HELD, samples=st.integers(1, 8), warm_up=st.integers(1, 6), more=st.integers(0, 6))
def test_the_peak_of_1f1b_follows_from_its_warm_up(held: Figures, samples: int, warm_up: int, more: int) -> None:
    """The formula of the search against the order, action by action."""
    number = warm_up + more
    changes = allocations(held, samples, recomputes=True)
    forwards, backwards = ([Action(0, kind, i) for i in range(number)] for kind in (Kind.FORWARD, Kind.BACKWARD))
    order = [action.kind for action in alternating(forwards, backwards, warm_up)]
    kinds = [part for kind in order for part in ((Kind.RECOMPUTE, kind) if kind is Kind.BACKWARD else (kind,))]
    expected = warm_up_peak(0.0, held.activation_bytes.at(samples), held.working_bytes.at(samples), warm_up)
    assert peak(changes[kind] for kind in kinds) == expected

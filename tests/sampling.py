"""Which cases of a table run with every test, and which only in `make acceptance`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sample(cases: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """The cases as parameters of a test; those that are not among `always` are marked as acceptance tests.

    A case is a value, or a tuple of them whose first one counts.
    """
    return [case if _name(case) in always else _rare(case) for case in cases]


def _name(case: Any) -> Any:
    return case[0] if isinstance(case, tuple) else case


def _rare(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.acceptance)

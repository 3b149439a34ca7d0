"""Takes the fake tensors that a recording left in users' objects out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor

from lightning_gpp.capture.attributes import is_plain
from lightning_gpp.capture.read_ahead import KeptIterator
from lightning_gpp.capture.shared_objects import DICTS, SEQUENCES, Holder
from lightning_gpp.user_code import own_attributes

_DEEPEST: Final = 3
_MISSING: Final = object()


@contextmanager
def without_fake_tensors(holders: Sequence[Holder]) -> Iterator[None]:
    """Restore these containers, classes and attributes afterwards, if a fake tensor is in one of them.

    All of them, because a cache and its size may be in two places. Of classes and global variables only tensors and
    plain values are restored: others are no caches.
    """
    with unchanged(holders, lambda changed: any(_holds_tensor(_new(holder, known)) for holder, known in changed)):
        yield


@contextmanager
def unchanged(
    holders: Sequence[Holder], counts: Callable[[Sequence[tuple[Holder, Any]]], bool] = bool
) -> Iterator[None]:
    """Restore these containers, classes and attributes afterwards, if the changed ones and their copies count."""
    before = [(holder, _copied(holder)) for holder in holders]
    try:
        yield
    finally:
        changed = [(holder, known) for holder, known in before if _differs(holder, known)]
        if counts(changed):
            for holder, known in changed:
                _restore(holder, known)


def _copied(holder: Holder) -> Any:
    if isinstance(holder, type):
        return dict(vars(holder))
    return dict(holder) if isinstance(holder, dict) else list(holder)


def _differs(holder: Holder, known: Any) -> bool:
    now = _copied(holder)
    if len(now) != len(known):
        return True
    if isinstance(now, dict):
        return any(known.get(key, _MISSING) is not value for key, value in now.items())
    return any(one is not other for one, other in zip(now, known, strict=True))


def _new(holder: Holder, known: Any) -> list[Any]:
    """The items that have come into a holder."""
    now = _copied(holder)
    if isinstance(now, dict):
        return [value for key, value in now.items() if known.get(key, _MISSING) is not value]
    ids = set(map(id, known))
    return [value for value in now if id(value) not in ids]


def _holds_tensor(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Tensor):
        return True
    if depth > _DEEPEST or isinstance(value, KeptIterator):  # which recordings put there to stay
        return False
    return any(_holds_tensor(inner, depth + 1) for inner in _parts(value))


def _parts(value: Any) -> Iterable[Any]:
    if type(value) in DICTS:
        return list(value.values())
    if type(value) in SEQUENCES:
        return list(value)
    return [] if isinstance(value, type) else list((own_attributes(value) or {}).values())


def _restore(holder: Holder, known: Any) -> None:
    if isinstance(holder, type):
        _restore_class(holder, known)
    elif isinstance(holder, dict):
        _restore_dict(holder, known)
    else:
        holder.clear()
        holder.update(known) if isinstance(holder, set) else holder.extend(known)


def _restore_dict(holder: dict[Any, Any], known: Mapping[Any, Any]) -> None:
    for key in _to_restore(holder, known):
        if key in known:
            holder[key] = known[key]
        else:
            del holder[key]


def _restore_class(holder: type, known: Mapping[str, Any]) -> None:
    for key in _to_restore(vars(holder), known):
        if key in known:
            setattr(holder, key, known[key])
        else:
            delattr(holder, key)


def _to_restore(now: Mapping[Any, Any], known: Mapping[Any, Any]) -> list[Any]:
    def is_value(value: Any) -> bool:
        return is_plain(value) or _holds_tensor(value)

    keys = [*now, *(key for key in known if key not in now)]
    changed = [key for key in keys if now.get(key, _MISSING) is not known.get(key, _MISSING)]
    in_scope = "__module__" in known or "__name__" in known
    return [key for key in changed if not in_scope or is_value(now.get(key))]

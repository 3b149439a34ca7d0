"""Hooks that users have put into an object itself, as LambdaCallback does, are there again after a run."""

from __future__ import annotations

from lightning.pytorch.callbacks import LambdaCallback

from lightning_gpp.replaced import Replaced


def test_what_was_there_comes_back() -> None:
    owner, replaced = LambdaCallback(on_train_end=lambda *_: "the user's"), Replaced()
    before = dict(vars(owner))
    for name, value in (("on_train_end", 1), ("on_train_end", 2), ("on_fit_end", 3)):
        replaced.put(owner, name, value)
    assert (owner.on_train_end, owner.on_fit_end) == (2, 3)
    assert replaced
    replaced.restore()
    assert vars(owner) == before
    assert not replaced

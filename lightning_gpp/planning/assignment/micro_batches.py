"""Resolves the size of micro-batches from the user's settings."""

from __future__ import annotations

from lightning_gpp.errors import ConfigError


def resolve_size(batch_size: int, num_micro_batches: int | None, micro_batch_size: int | None, default: int) -> int:
    """Samples of a micro-batch.

    Args:
        batch_size: samples of the mini-batch of one pipeline replica.
        num_micro_batches: the user's, or None.
        micro_batch_size: the user's, or None.
        default: the number of micro-batches where the user gave neither; at most one per sample is made.

    Raises:
        ConfigError: both are given, or the mini-batch cannot be cut that way.
    """
    if num_micro_batches is not None and micro_batch_size is not None:
        raise ConfigError(
            f"Both strategy.num_micro_batches={num_micro_batches} and strategy.micro_batch_size={micro_batch_size} are "
            "given; each follows from the other: give one."
        )
    if micro_batch_size is not None:
        return _checked_size(batch_size, micro_batch_size)
    if num_micro_batches is not None:
        return _size_of(batch_size, num_micro_batches)
    return -(-batch_size // min(max(1, default), batch_size))


def _checked_size(batch_size: int, size: int) -> int:
    if not 1 <= size <= batch_size:
        raise ConfigError(
            f"strategy.micro_batch_size={size}, but a mini-batch has {batch_size} samples per pipeline; "
            f"choose a size from 1 to {batch_size}."
        )
    return size


def _size_of(batch_size: int, count: int) -> int:
    if count < 1:
        raise ConfigError(f"strategy.num_micro_batches={count}; it must be a whole number >= 1.")
    if count > batch_size:
        raise ConfigError(
            f"More micro-batches than samples: strategy.num_micro_batches={count}, but a mini-batch has {batch_size} "
            f"samples per pipeline. Set strategy.num_micro_batches to at most {batch_size}, or enlarge the batch."
        )
    size = -(-batch_size // count)
    if -(-batch_size // size) != count:
        raise ConfigError(
            f"strategy.num_micro_batches={count}: {batch_size} samples do not give {count} micro-batches of one size "
            f"(the last may be smaller); {size} samples each give {-(-batch_size // size)}. "
            f"Set strategy.num_micro_batches={-(-batch_size // size)}, or strategy.micro_batch_size."
        )
    return size

"""The samples of a micro-batch, from the settings of which each follows from the other."""

from __future__ import annotations

from lightning_gpp.errors import ConfigError, MicroBatchesError
from lightning_gpp.wording import counted


def resolve_size(batch_size: int, num_micro_batches: int | None, micro_batch_size: int | None, default: int) -> int:
    """Samples of a micro-batch.

    Args:
        batch_size: samples of the mini-batch of one pipeline replica.
        num_micro_batches: the user's, or None.
        micro_batch_size: the user's, or None.
        default: number of micro-batches if the user gave neither, limited to one per sample.

    Raises:
        ConfigError: both are given, or the mini-batch cannot be cut into these micro-batches.
    """
    check_one_given(num_micro_batches, micro_batch_size)
    if micro_batch_size is not None:
        return _checked_size(batch_size, micro_batch_size)
    if num_micro_batches is not None:
        return _size_of(batch_size, num_micro_batches)
    return -(-batch_size // min(max(1, default), batch_size))


def check_one_given(num_micro_batches: int | None, micro_batch_size: int | None) -> None:
    """Refuse both a number and a size of micro-batches.

    Raises:
        ConfigError: both are given.
    """
    if num_micro_batches is not None and micro_batch_size is not None:
        raise ConfigError(
            f"Both strategy.num_micro_batches={num_micro_batches} and strategy.micro_batch_size={micro_batch_size} are "
            "given, but each follows from the other; give one."
        )


def _checked_size(batch_size: int, size: int) -> int:
    if not 1 <= size <= batch_size:
        raise MicroBatchesError(
            f"strategy.micro_batch_size={size}, but a mini-batch has {counted(batch_size, 'sample')} per pipeline; "
            f"choose a size from 1 to {batch_size}."
        )
    return size


def _size_of(batch_size: int, count: int) -> int:
    if count < 1:
        raise ConfigError(f"strategy.num_micro_batches={count}; it must be a whole number >= 1.")
    if count > batch_size:
        raise MicroBatchesError(
            f"More micro-batches than samples: strategy.num_micro_batches={count}, but a mini-batch has "
            f"{counted(batch_size, 'sample')} per pipeline. Set strategy.num_micro_batches to at most {batch_size}, or "
            "enlarge the batch."
        )
    size = -(-batch_size // count)
    if -(-batch_size // size) != count:
        raise MicroBatchesError(
            f"strategy.num_micro_batches={count}: {batch_size} samples do not give {count} micro-batches of one size "
            f"(the last may be smaller); {size} samples each give {-(-batch_size // size)}. "
            f"Set strategy.num_micro_batches={-(-batch_size // size)}, or strategy.micro_batch_size."
        )
    return size

"""Formats counts, bytes and seconds for people, with the prefix that keeps them short."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10
from typing import Final

TIME_UNITS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
"""Units of seconds, the largest first."""


def count(number: float) -> str:
    """1234567 -> 1.23M."""
    return _scaled(number, 1000, ("", "k", "M", "G", "T", "P", "E"))


def size(num_bytes: float) -> str:
    """2048 -> 2 KiB."""
    return _scaled(num_bytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def duration(seconds: float) -> str:
    """0.0021 -> 2.1 ms."""
    if not seconds:
        return "0 s"
    factor, unit = next(((factor, unit) for factor, unit in TIME_UNITS if seconds >= factor), TIME_UNITS[-1])
    return f"{seconds / factor:.3g} {unit}"


def rate(per_second: float) -> str:
    """25243.7 -> 25240: four digits, without an exponent."""
    return f"{float(f'{per_second:.4g}'):.0f}" if per_second >= 1e4 else f"{per_second:.4g}"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def distance(gap: float | None) -> str:
    """Distance from a bound in per cent of it; `-` if none is known."""
    return "-" if gap is None else f"{100 * gap:.1f} %"


def ranges(numbers: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> "0-2,5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else ",".join(map(str, part)) for part in parts)


def _scaled(number: float, base: int, prefixes: tuple[str, ...]) -> str:
    value, index = float(number), 0
    # 999.5 would be rounded to 1e+03, so it takes the next prefix
    while abs(value) >= min(base, 999.5) and index < len(prefixes) - 1:
        value, index = value / base, index + 1
    text = f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    return text + prefixes[index]


def ticks(seconds: float, most: int) -> list[tuple[float, str]]:
    """Round times from 0 on for an axis of this length, at most `most` of them besides 0, with their labels."""
    if seconds <= 0:
        return [(0.0, "0")]
    least = seconds / max(1, most)
    power = 10.0 ** floor(log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    times = [step * number for number in range(1, int(seconds / step * (1 + 1e-9)) + 1)]
    unit, name = next((entry for entry in TIME_UNITS if times[-1] >= entry[0] * (1 - 1e-9)), TIME_UNITS[-1])
    return [(0.0, "0"), *((time, f"{time / unit:.6g} {name}") for time in times)]

"""Formats counts, bytes and seconds for people, with the prefix that keeps them short."""

from __future__ import annotations


def count(number: float) -> str:
    """1234567 -> 1.23M."""
    return _scaled(number, 1000, ("", "k", "M", "G", "T", "P", "E"))


def size(num_bytes: float) -> str:
    """2048 -> 2 KiB."""
    return _scaled(num_bytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def duration(seconds: float) -> str:
    """0.0021 -> 2.1 ms."""
    for factor, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def distance(gap: float | None) -> str:
    """Distance from a bound in per cent of it; `-` if none is known."""
    return "-" if gap is None else f"{100 * gap:.1f} %"


def _scaled(number: float, base: int, prefixes: tuple[str, ...]) -> str:
    value, index = float(number), 0
    # 999.5 would be rounded to 1e+03, so it takes the next prefix
    while abs(value) >= min(base, 999.5) and index < len(prefixes) - 1:
        value, index = value / base, index + 1
    text = f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    return text + prefixes[index]


def counted(number: int, noun: str) -> str:
    """`1 stage`, `2 stages`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

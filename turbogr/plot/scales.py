"""Axes of a chart: positions of ticks, formats of numbers, and the map from values to pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Format = Callable[[float], str]

_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(value: float) -> str:
    """Write a number in at most four digits with an SI suffix: 21000 is 21k, 0.1104 is 0.1104."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size == 0:
        return "0"
    for unit, suffix in _SI:
        if size >= unit * 0.99995:
            return f"{value / unit:.4g}{suffix}".replace("-", "−")
    text = f"{value:.4g}"
    if "e" in text:
        mantissa, _, exponent = text.partition("e")
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", "−")


def percent(value: float) -> str:
    """Write a share as a percentage: 0.3097 is 30.97 %."""
    if not math.isfinite(value):
        return str(value)
    return f"{value * 100:.4g} %".replace("-", "−")


def drawable(value: float, log: bool = False) -> bool:
    """Return whether a value can be drawn on an axis: finite, positive if `log`, and between 1e-100 and 1e100."""
    size = abs(value)
    return (not log and value == 0) or ((value > 0 or not log) and 1e-100 <= size <= 1e100)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers (1, 2 or 5 times a power of ten apart) within [low, high], low < high."""
    assert low < high
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [_clean(index * step, step) for index in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return powers of ten within [low, high], 0 < low < high, thinned to about `count`, or with 2 and 5 if too few."""
    assert 0 < low < high
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    decades = last - first + 1
    if decades >= 3:
        stride = math.ceil(decades / count)
        return [10.0**power for power in range(first, last + 1, stride)]
    fine = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
    fine = [tick for tick in fine if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
    return fine if len(fine) >= 2 else ticks(low, high, count)


def _clean(value: float, step: float) -> float:
    digits = max(0, 1 - math.floor(math.log10(step)))
    return round(value, digits) + 0.0  # + 0.0 turns -0.0 into 0.0


@dataclass(frozen=True)
class Axis:
    """What an axis shows: its `label`, whether it is logarithmic, how numbers are written, whether it includes zero."""

    label: str = ""
    log: bool = False
    format: Format = si
    zero: bool = False
    integer: bool = False


@dataclass(frozen=True)
class Scale:
    """A map from values in [low, high] to pixels in [start, end], linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def fit(cls, values: Iterable[float], axis: Axis, start: float, end: float, *, pad: float = 0.0) -> Scale:
        """Return a scale that holds every drawable value, widened by `pad` of its span (never across zero)."""
        fitting = [value for value in values if drawable(value, axis.log)]
        if axis.zero and not axis.log:
            fitting.append(0.0)
        low, high = (min(fitting), max(fitting)) if fitting else ((1.0, 10.0) if axis.log else (0.0, 1.0))
        if axis.log:
            if high <= low * 1.0001:
                low, high = low / 2, high * 2
            span = math.log(high / low)
            return cls(low * math.exp(-pad * span), high * math.exp(pad * span), start, end, True)
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            widen = abs(low) * 0.1 or 1.0
            low, high = low - widen, high + widen
        span = high - low
        below = 0.0 if low == 0.0 else pad * span
        above = 0.0 if high == 0.0 else pad * span
        below = min(below, low) if low > 0 else below
        return cls(low - below, high + above, start, end)

    def drawable(self, value: float) -> bool:
        """Return whether `value` can be drawn on this scale."""
        return drawable(value, self.log)

    def __call__(self, value: float) -> float:
        """Return the pixel of a drawable value."""
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int, *, integer: bool = False) -> list[float]:
        """Return about `count` round values on this scale; only whole numbers when `integer`."""
        found = (log_ticks if self.log else ticks)(self.low, self.high, count)
        if integer:
            found = [tick for tick in found if float(tick).is_integer()]
        return found


def text_width(text: str, size: float) -> float:
    """Return how many pixels `text` takes, at most and about, in a wide sans-serif font of `size` pixels."""
    return size * sum(_character_width(character) for character in text)


def _character_width(character: str) -> float:
    if character in "ijltfrI.,:;|!'()[] ":
        return 0.4
    if character in "mwMW@%":
        return 1.0
    if ord(character) >= 0x2E80:  # East Asian and emoji: full width
        return 1.0
    return 0.76 if character.isupper() else 0.64


def shorten(text: str, size: float, room: float) -> str:
    """Return `text`, or its beginning with an ellipsis if it would be wider than `room` pixels."""
    if text_width(text, size) <= room:
        return text
    kept = ""
    for character in text:
        if text_width(kept + character + "…", size) > room:
            break
        kept += character
    return kept + "…"


def thin_labels(positions: Sequence[float], labels: Sequence[str], size: float, gap: float = 8.0) -> list[int]:
    """Return the indices of labels, centred at ascending `positions`, that can be drawn without touching."""
    kept: list[int] = []
    edge = -math.inf
    for index, (position, label) in enumerate(zip(positions, labels, strict=True)):
        half = text_width(label, size) / 2
        if position - half >= edge + gap:
            kept.append(index)
            edge = position + half
    return kept

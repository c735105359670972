"""Readable text for numbers and names: bytes, durations, counts, metrics; and HTML escaping.

Every function accepts `None` (unknown), which a run folder may contain, and returns an en dash.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from dure.peer_text import printable
from dure.record.history import lower_is_better
from dure.report.translation import counted, recorded, translated

UNKNOWN = "–"


def escape(text: object) -> str:
    """Escape untrusted text for HTML elements and quoted attributes.

    Invisible characters, such as those that change the reading order, are removed; line breaks
    stay.
    """
    return html.escape("\n".join(map(printable, str(text).split("\n"))), quote=True)


def count(value: float | None) -> str:
    """Return a count with thousands separators: 1,663,370; a fraction has one digit: 311.5."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1e4 else f"{value:,.1f}"


def plural(value: float | None, unit: str) -> str:
    """Return a count with its unit: 1 step, 2 steps, – steps."""
    phrase = counted(count(value), unit)
    return phrase or f"{count(value)} {unit}" + ("" if value == 1 else "s")


def size(value: float | None) -> str:
    """Return bytes in powers of ten: 812 B, 2.65 MB."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "kB", "MB", "GB", "TB"):
        # 999.5 and more would round to 1000, so the next unit is used.
        if abs(value) < 999.5 or unit == "TB":
            return f"{_three_digits(value)} {unit}"
        value /= 1000
    raise AssertionError("not reached")


def duration(seconds: float | None) -> str:
    """Return a duration: 41 ms, 3.10 s, 4 min 12 s, 2 h 05 min."""
    if seconds is None:
        return UNKNOWN
    # From 0.9995 s on, three digits of milliseconds would be 1000.
    if 0 < seconds < 0.9995:
        return f"{_three_digits(seconds * 1000)} ms"
    if seconds < 120:
        return f"{_three_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def metric_name(key: str) -> str:
    """Return a metric's key in words: test_accuracy -> accuracy, test_loss -> test loss."""
    # "test" is left out, except for a loss, since training has a loss too.
    words = key.replace("_", " ")
    bare = words.removeprefix("test ")
    return recorded(words if "loss" in bare else bare)


def metric_value(key: str, value: float | None) -> str:
    """Return a metric with four digits, accuracies in percent."""
    if value is None:
        return UNKNOWN
    return f"{100 * value:.2f} %" if is_share(key) else f"{value:.4g}"


def is_share(key: str) -> bool:
    """Return whether the metric is a share of 1, shown in percent."""
    return "accuracy" in key


def higher_is_better(key: str) -> bool:
    """Return whether a higher value is better, by name: losses and errors fall, others rise."""
    return not lower_is_better(key)


def listed(names: Sequence[str], most: int = 6) -> str:
    """Join names: a, b and c; a long list is cut and ends with the number left out."""
    if len(names) > most:
        first = ", ".join(names[:most])
        return translated("{first} and {count} more", first=first, count=len(names) - most)
    return translated(" and ").join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    # The bounds are the values at which rounding would add a digit.
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    text = f"{value:.{digits}f}"
    # A value that rounds to 0.00 is shown with one significant digit.
    return text if float(text) else f"{value:.1g}"

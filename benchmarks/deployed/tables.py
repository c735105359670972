"""What benchmarks/deployment.py has found, as tables for a page of the documentation."""

from __future__ import annotations

from typing import Any

from pages import table

JSON = dict[str, Any]


def blocks(found: JSON) -> dict[str, str]:
    """By the names of the marks in the page, as far as it was measured."""
    made = {}
    if "rounds" in found:
        made["rounds"] = rounds(found["rounds"])
    made["deployed"] = table(["", "measured"], answers(found))
    return made


def rounds(found: JSON) -> str:
    """Contenders against sizes; then, of the smallest and the largest usual model, what else."""
    rows = found["rows"]
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    few, large = "2 x 0.8 MB", "2 x 40 MB"
    head = ["", *rows, f"first round, {few}", f"server, {large}", f"all processes, {large}"]
    body = [
        [
            name,
            *(_seconds(_median(rows, size, name, "seconds")) for size in rows),
            _seconds(_median(rows, few, name, "first_round_from_cold")),
            _megabytes(_median(rows, large, name, "peak_bytes_of_server")),
            _megabytes(_median(rows, large, name, "peak_bytes_of_all")),
        ]
        for name in names
    ]
    return table(head, body)


def answers(found: JSON) -> list[tuple[str, str]]:
    """Question and answer of the other measures."""
    measures = {"memory": _memory, "idle": _idle, "link": _link, "resume": _resume}
    return [one for name, told in measures.items() if name in found for one in told(found[name])]


def _memory(found: JSON) -> list[tuple[str, str]]:
    rows = found["rows"]
    models = ", ".join(f"{row['models_over_base']:.1f}" for row in rows.values())
    question = f"server's peak with {', '.join(rows)} clients, minus the peak with an empty model"
    return [(question, f"{models} models of {_megabytes(found['model_bytes'])}")]


def _idle(found: JSON) -> list[tuple[str, str]]:
    clients = f"{found['clients']:,} waiting clients"
    waiting, memory = found["check_in_among_the_waiting"], found["server_bytes"]
    kinds = f"{_megabytes(memory['anonymous'])}, {_megabytes(memory['of_files'])}"
    of_each = f"{found['anonymous_bytes_of_a_client'] / 1000:.0f} kB"
    return [
        (
            f"check-in among {clients}: median, 99th percentile",
            _two(waiting["p50"], waiting["p99"]),
        ),
        (f"server's memory with {clients}: anonymous, pages of libraries", kinds),
        ("anonymous memory for each waiting client", of_each),
    ]


def _link(found: JSON) -> list[tuple[str, str]]:
    if "broken" not in found:
        return []
    broken = found["broken"]
    rates = f"{broken['accepted_over_size']:.2f}, {broken['wire_over_size']:.2f} of its size"
    question = f"100 Mbit/s, 50 ms: an update that breaks {broken['breaks']} times: accepted, sent"
    return [(question, rates)]


def _resume(found: JSON) -> list[tuple[str, str]]:
    bits = "the bits of the unbroken run" if found["same_bits"] else "other bits"
    served, filled = found["served_again"], found["place_filled"]["median"]
    return [
        (f"a server that is killed {found['kills']} times", bits),
        ("clients are served again: median, the last", _two(served["median"], served["largest"])),
        ("another client works in place of a killed client", _seconds(filled)),
    ]


def _median(rows: JSON, size: str, name: str, what: str) -> float | None:
    samples = rows.get(size, {}).get(name, {}).get(what)
    return None if samples is None else float(samples["median"])


def _two(one: float, other: float) -> str:
    return f"{_seconds(one)}, {_seconds(other)}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:.3g} ms" if value < 0.1 else f"{value:.2g} s"


def _megabytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e6:,.0f} MB"

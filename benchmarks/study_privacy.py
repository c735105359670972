"""Privacy: what it costs in accuracy, bytes and seconds, and what it keeps from others.

1. Accuracy against epsilon: DP-SGD on pictures and on patients, DP-FedAvg on clients
   (privacy_study/accuracy.py).
2. A round of secure aggregation against clients, weights and drop-outs (privacy_study/sums.py).
3. What attacks recover from updates, and what canaries say of epsilon: read from the result of
   benchmarks/study_updates.py, which measures it.

    python benchmarks/study_privacy.py --data DIR --result benchmarks/results/study_privacy.json
    python benchmarks/study_privacy.py --from benchmarks/results/study_privacy.json \\
        --figures docs/images --page docs/study-privacy.md

DIR has the folders mnist, fashion-mnist and heart-disease. It takes a quarter of an hour on one
core; --quick a minute, with figures that say little. --parts takes some of accuracy and sums; what
an earlier --result has of the others stays. Progress goes to standard error, the result as JSON to
standard output and to --result, which a run that fails leaves as it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "privacy_study"))

from accuracy import DELTA, SETTINGS, accuracy
from privacy_page import draw, write_page
from sums import sums

from dure.record.disk import write_atomically

JSON = dict[str, Any]
PARTS = ("accuracy", "sums")
UPDATES = Path(__file__).parent / "results" / "study_updates.json"


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(data: Path, parts: Sequence[str], names: Sequence[str], quick: bool) -> JSON:
    """The parts of the study, of the settings with these names."""
    result: JSON = {"quick": quick, "torch": torch.__version__, "delta": DELTA}
    started = time.perf_counter()
    if "accuracy" in parts:
        result["accuracy"] = {}
        for setting in SETTINGS:
            if setting.name in names:
                show(setting.title)
                asked = setting.quick() if quick else setting
                result["accuracy"][setting.name] = accuracy(asked, data, show)
    if "sums" in parts:
        show("secure aggregation")
        result["sums"] = sums(quick, show)
    return {**result, "seconds": time.perf_counter() - started}


def joined(earlier: JSON, result: JSON) -> JSON:
    """What was measured now, and of an earlier result what was not."""
    both = {**earlier, **result}
    if "accuracy" in both:
        measured = {**earlier.get("accuracy", {}), **result.get("accuracy", {})}
        order = [setting.name for setting in SETTINGS if setting.name in measured]
        both["accuracy"] = {name: measured[name] for name in order}
    return both


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--data", type=Path, help="the folder of the three data sets")
    parser.add_argument("--quick", action="store_true", help="a minute")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--settings", nargs="+", choices=names, default=names, help="of accuracy")
    parser.add_argument("--result", type=Path, help="a file for the result")
    parser.add_argument("--from", type=Path, dest="earlier", help="a result that is there already")
    parser.add_argument("--updates", type=Path, default=UPDATES, help="study_updates.py's result")
    parser.add_argument("--figures", type=Path, help="the folder for the figure")
    parser.add_argument("--page", type=Path, help="the page whose tables to fill")
    asked = parser.parse_args()
    if (asked.data is None) == (asked.earlier is None):
        parser.error("give --data, or --from with an earlier result")
    if asked.quick and asked.result is not None:
        parser.error("the figures of --quick say little, and are no --result")
    return asked


def main() -> None:
    asked = parsed()
    torch.set_num_threads(1)
    if asked.earlier is None:
        result = measure(asked.data.resolve(), asked.parts, asked.settings, asked.quick)
        if asked.result is not None:
            if asked.result.exists():
                result = joined(json.loads(asked.result.read_text()), result)
            write_atomically(asked.result, f"{json.dumps(result, allow_nan=False)}\n".encode())
        print(json.dumps(result, allow_nan=False))
    else:
        result = json.loads(asked.earlier.read_text())
    if asked.figures is not None:
        draw(result, asked.figures)
    if asked.page is not None:
        updates = json.loads(asked.updates.read_text()) if asked.updates.exists() else None
        write_page(result, updates, asked.page)


if __name__ == "__main__":
    main()

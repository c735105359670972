"""Where a benchmark's result goes: into a file, which then has all of it, or to standard output.

    python benchmarks/NAME.py --result benchmarks/results/NAME.json

A file that is there stays as it is until the benchmark has come to its end. So one that fails, or
is interrupted, leaves the older result; `> FILE` would empty it before anything is measured. In a
file it has the commit that it was measured on, by which pages mark figures of older code.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measured import commit

from dure.record.disk import write_atomically


def takes_result(parser: argparse.ArgumentParser) -> None:
    """Adds the option --result."""
    parser.add_argument(
        "--result",
        type=Path,
        metavar="FILE",
        help="the file for the result, which is replaced in the end; else it is printed",
    )


def give(found: Mapping[str, Any], file: Path | None, **how: Any) -> None:
    """The result as JSON. file: None prints it. how: arguments of `json.dumps`."""
    if file is None:
        sys.stdout.write(json.dumps(found, **how) + "\n")
        sys.stdout.flush()
        return
    text = json.dumps({**found, "commit": commit()}, **how) + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text.encode())

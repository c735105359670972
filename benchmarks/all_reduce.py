"""All-reduce on this machine: gloo, Open MPI, dure's shared memory, and every algorithm over gloo.

    python benchmarks/all_reduce.py [options of dure bench all-reduce] \\
        --result benchmarks/results/all_reduce.json

The result goes to that file, or to standard output, as JSON (its fields: dure.bench.result),
progress and tables to standard error. The cost model is fitted as well. Run it on a machine that
has nothing else to do. docs/benchmarks.md says how it measures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from outcome import give, takes_result

from dure.cli.main import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    takes_result(parser)
    asked, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        status = main(["bench", "all-reduce", "--fit", *options, "--out", folder])
        result = Path(folder) / "all-reduce.json"
        if status != 0 or not result.exists():  # after --help there is none
            sys.exit(status)
        give(json.loads(result.read_text()), asked.result)

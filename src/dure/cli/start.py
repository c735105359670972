"""Entry point of the command `dure`, which handles Ctrl-C before the other modules are imported."""

from __future__ import annotations

import os
import sys

from dure.cli.interrupts import STATUS, interrupts_end_imports, leave_at_once


def main() -> int:
    """Run the command line, and return the exit status."""
    try:
        with interrupts_end_imports():
            from dure.cli.main import main as run

            return leave_at_once(run())
    except KeyboardInterrupt:  # between one import and the next
        os.write(2, b"dure: interrupted\n")
        return leave_at_once(STATUS)


if __name__ == "__main__":
    sys.exit(main())

"""A disk that keeps only what was synced: what a power failure leaves, at any moment.

`kill -9` does not tell whether a program syncs, since the system writes what was not synced a
little later. `run_on_it` runs a function in a process of its own, whose syncs are noted by
forgetful_disk.c; `what_it_has` writes, there or afterwards, what would be found after a failure.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_suffix(".c")


def run_on_it(program: str, of: Path, *arguments: str) -> str:
    """What `program`, a file of this folder, prints; `of`: the folder on the forgetful disk.

    Skips the test where there is no C compiler. Raises CalledProcessError if it fails.
    """
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler, and Linux")
    library = of.with_name(f"{of.name}.so")
    flags = ["-shared", "-fPIC", "-pthread", "-o", str(library), str(_SOURCE), "-ldl"]
    subprocess.run([compiler, *flags], check=True)
    has = of.with_name(f"{of.name}.has")
    of.mkdir()
    has.mkdir()
    done = subprocess.run(
        [sys.executable, str(_SOURCE.with_name(program)), str(of), *arguments],
        env={**os.environ, "LD_PRELOAD": str(library), "DISK_OF": str(of), "DISK_HAS": str(has)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def what_it_has(of: Path, to: Path, luck: random.Random | None = None) -> Path:
    """Makes the folder `to` what the disk has of `of` by now.

    luck: decides for each file whether what was not synced came to the disk all the same, as the
    system may write it at any time.
    """
    shutil.rmtree(to, ignore_errors=True)
    _restore(of, of.with_name(f"{of.name}.has"), to, luck)
    return to


def _restore(of: Path, has: Path, to: Path, luck: random.Random | None) -> None:
    to.mkdir()
    names = has / f"{of.stat().st_ino}.names"
    lines = names.read_text().splitlines() if names.exists() else []
    for line in lines:
        inode, name = line.split(" ", 1)
        here = of / name
        if (has / f"{inode}.names").exists() or here.is_dir():
            _restore(here, has, to / name, luck)
            continue
        kept = has / inode
        if luck is not None and luck.random() < 0.5:
            there = here.exists() and here.stat().st_ino == int(inode)
            kept = here if there else kept
        (to / name).write_bytes(kept.read_bytes() if kept.exists() else b"")

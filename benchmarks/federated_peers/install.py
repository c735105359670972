"""A virtual environment for every peer of the federated simulation: DIR/<peer>, by
requirements/<peer>.txt.

    python benchmarks/federated_peers/install.py DIR [PEER ...] [--pip-args="--extra-index-url ..."]

Each needs up to 2 GB of disk. torch comes first, by the repository's constraints.txt, so that a CPU
build stays one. A peer that cannot be installed is left out, and the benchmark reports it as
skipped.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
CONSTRAINTS = HERE.parents[1] / "constraints.txt"
KNOWN = sorted(file.stem for file in (HERE / "requirements").glob("*.txt"))


def install(folder: Path, requirements: Path, pip_args: list[str]) -> None:
    venv.create(folder, with_pip=True, clear=True)
    pip = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "install",
        *pip_args,
    ]
    torch = [line for line in requirements.read_text().splitlines() if line.startswith("torch==")]
    if torch:
        subprocess.run([*pip, "--constraint", CONSTRAINTS, *torch], check=True)
    subprocess.run([*pip, "--requirement", requirements], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path)
    parser.add_argument("peers", nargs="*", metavar="PEER", default=[], help=", ".join(KNOWN))
    parser.add_argument("--pip-args", type=shlex.split, default=[])
    asked = parser.parse_args()
    failed = []
    for peer in asked.peers or KNOWN:
        print(f"installing {peer}", file=sys.stderr, flush=True)
        try:
            install(asked.dir / peer, HERE / "requirements" / f"{peer}.txt", asked.pip_args)
        except subprocess.CalledProcessError as error:
            shutil.rmtree(asked.dir / peer)
            failed.append(f"{peer}: {shlex.join(map(str, error.cmd))} failed")
    sys.exit("\n".join(failed) if failed else 0)


if __name__ == "__main__":
    main()

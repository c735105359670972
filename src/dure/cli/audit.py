"""`dure audit`: verify the log of a client, or attack the recorded updates of a simulation.

dure audit FILE    verify that the log is unchanged
dure audit RUN     attack the recorded updates of a simulation
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.cli.flags import names_before_flags, parse_flags
from dure.peer_text import printable

if TYPE_CHECKING:
    from dure.federated.attacks.examine import AttackResult

USAGE = "dure audit FILE|RUN"

PROGRESS_SECONDS = 2.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class AuditOptions:
    """Options of attacks on the updates of a run.

    Args:
        sums: numbers of updates that are added before the attack, as secure aggregation does.
        noise: noise multipliers with which each attack is repeated, after clipping; 0 is none.
        compression: compressions with which each attack is repeated, such as none, int8,
            top-k:0.01.
        attacks: any of labels, first-layer, dlg, geiping and membership; all by default.
        groups: number of attacked sums of each size.
        most: largest number of examples of a sum that are reconstructed.
        iterations: iterations of the inversions.
        canaries: number of clients replaced by canaries, in another training; 0 trains nothing.
        delta: delta of the canaries' bound on epsilon; by default that of the run's promise, or
            1e-5.
        seed: seed of the attacks' starting points.
        task: the task, path/to/file.py:name, if the run was not started here.
        strategy: the class of the strategy, path/to/file.py:Name, likewise.
        json: print audit.json on standard output, and no table.
    """

    sums: tuple[int, ...] = (1, 8)
    noise: tuple[float, ...] = (0.0,)
    compression: tuple[str, ...] = ("none",)
    attacks: tuple[str, ...] = ()
    groups: int = 4
    most: int = 100
    iterations: int = 400
    canaries: int = 0
    delta: float | None = None
    seed: int = 0
    task: str | None = None
    strategy: str | None = None
    json: bool = False


def main(given: list[str]) -> int:
    """Run the command, and return the exit status.

    Raises AuditError for a changed log, and the errors of `run.audit`.
    """
    names, flags = names_before_flags(given)
    asks = flags in (["--help"], ["-h"])
    if len(names) != 1 and not asks:
        raise ValueError(f"{USAGE}: name the log of a client, or the folder of a run")
    about = "Check the log of a client; or attack the recorded updates of a simulation."
    if names and not Path(names[0]).is_dir() and not flags:
        return _log(names[0])
    how: AuditOptions = parse_flags(USAGE, {"how": AuditOptions}, flags, about)["how"]
    if not Path(names[0]).is_dir():
        raise ValueError(
            f"{names[0]} is not a run folder, and these options do not apply to a client's log"
        )
    return _run(names[0], how)


def _log(name: str) -> int:
    # Imported late, because it loads torch.
    from dure.deploy.client.audit_log import verify

    chain = verify(Path(name))
    print(
        f"{name}: {chain.lines} {'line' if chain.lines == 1 else 'lines'}, none changed since it "
        f"was written; the digest of the last line is {chain.digest}"
    )
    return 0


def _run(name: str, how: AuditOptions) -> int:
    from dure.collectives.compression import parse
    from dure.federated.attacks.changes import UpdateChange
    from dure.federated.attacks.examine import ATTACKS, Examination
    from dure.run.audit import audit

    changes = [UpdateChange(compression=parse(text)) for text in how.compression]
    changes += [UpdateChange(noise=noise) for noise in how.noise if noise]
    examination = Examination(
        sums=how.sums,
        changes=list(dict.fromkeys(changes)),
        groups=how.groups,
        most=how.most,
        iterations=how.iterations,
        attacks=how.attacks or ATTACKS,
        seed=how.seed,
    )
    found = audit(
        name,
        examination,
        canaries=how.canaries,
        delta=how.delta,
        task=how.task,
        strategy=how.strategy,
        say=_Progress(),
    )
    if how.json:
        print(json.dumps(found.content))
        return 0
    _show(found.rows, found.content)
    print(
        f"{name}/audit.json has all results; dure report {name} shows the pictures", file=sys.stderr
    )
    return 0


class _Progress:
    """Prints progress on standard error, every few seconds."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, what: str, done: int, of: int) -> None:
        if time.monotonic() - self._said < PROGRESS_SECONDS:
            return
        self._said = time.monotonic()
        print(f"{what}: {done} of {of}", file=sys.stderr, flush=True)


def _show(rows: Sequence[AttackResult], content: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("attack", "of", "update", "examples", "got"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        of = "1 update" if row.sum == 1 else f"{row.sum} updates"
        got = f"not attempted: {row.why}" if row.why else ", ".join(_figures(row))
        examples = f"{row.examples:.4g}" if row.groups else "–"
        cells = (row.attack, of, row.change, examples, got)
        table.add_row(*(escape(printable(cell)) for cell in cells))
    console = Console()
    # A file or a pipe has no width; rich would take 80 columns and wrap the table.
    (console if console.is_terminal else Console(width=160)).print(table)
    for line in _lines(content):
        print(line)


def _figures(row: AttackResult) -> list[str]:
    """Return texts such as "PSNR 31.2 [28.9, 33.1] dB"."""
    said = []
    for name, figure in row.figures.items():
        bounds = "" if figure.low == figure.high else f" [{figure.low:.3g}, {figure.high:.3g}]"
        words = {"psnr": "PSNR", "ssim": "SSIM", "mse": "MSE", "auc": "AUC"}
        said.append(f"{words.get(name, name.replace('_', ' '))} {figure.value:.3g}{bounds}")
    return said


def _lines(content: Mapping[str, Any]) -> list[str]:
    lines = []
    guess = content["guess"]
    if guess:
        lines.append(
            f"without any update, the mean of public examples has PSNR {guess['psnr']:.3g}"
        )
    if content["sums_only"]:
        lines.append(
            "the server of this run received only sums: it could not see the results for 1 update"
        )
    canaries = content.get("canaries")
    if canaries:
        lines.append(
            f"canaries: {canaries['right']} of {canaries['guessed']} guesses right, so epsilon is "
            f"at least {canaries['epsilon_at_least']:.3g} (delta {canaries['delta']:g}, 95 %)"
        )
    promised = content.get("promised")
    if promised:
        lines.append(
            f"the accountant guarantees epsilon at most {promised['epsilon']:.3g} (delta "
            f"{promised['delta']:g})"
        )
    return lines

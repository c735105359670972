"""Tables of results in the pages of docs/, so that no number is copied by hand.

    <!-- steps -->

    | batch | steps |
    | --- | --: |
    | 64 | 131 |

    <!-- /steps -->

`fill(page, {"steps": table(...)})` replaces what is between the marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dure.record.disk import write_atomically


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; all but the first column are set to the right."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])


def fill(page: Path, blocks: Mapping[str, str]) -> None:
    """Writes each block between its marks. Raises ValueError if the page has no such marks."""
    text = page.read_text()
    for name, content in blocks.items():
        start = f"<!-- {name} -->\n"
        end = f"<!-- /{name} -->"
        before, opened, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not opened or not closed:
            raise ValueError(f"{page} has no {start.strip()} with its {end}")
        text = f"{before}{start}\n{content}\n\n{end}{after}"
    write_atomically(page, text.encode())

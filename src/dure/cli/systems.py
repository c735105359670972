"""`dure systems`: all systems as a family tree, a line each, and the worlds that support them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dure import catalog


def main(given: list[str]) -> int:
    """Print the tree, without importing any system."""
    if given not in ([], ["--help"], ["-h"]):
        raise ValueError("dure systems takes no options: it prints all systems and their worlds")
    print(tree(), end="")
    return 0


def tree() -> str:
    """Return the text of `dure systems`."""
    lines = ["Systems, by what they divide, and the worlds in which they run", ""]
    for family in catalog.FAMILIES:
        lines += [*_branch(family, ""), ""]
    lines += ["Worlds", ""]
    lines += [f"  {name:<12} {world.summary}" for name, world in catalog.WORLDS.items()]
    lines += [
        "",
        "dure train TASK SYSTEM --help lists the settings of a system; docs/SYSTEM.md explains it",
    ]
    return "\n".join(lines) + "\n"


def _branch(family: catalog.Family, before: str) -> Iterator[str]:
    """Yield the lines of a branch. before: prefix of every line."""
    where = f" [{', '.join(family.worlds)}]" if family.worlds else ""
    yield f"{family.title}{where}"
    leaves: list[Sequence[str]] = [
        [f"{name:<16} {catalog.SYSTEMS[name].summary}"] for name in family.systems
    ]
    children = [*leaves, *(list(_branch(branch, before)) for branch in family.branches)]
    for number, child in enumerate(children):
        last = number == len(children) - 1
        first, *rest = child
        yield f"{before}{'└─' if last else '├─'} {first}"
        for line in rest:
            yield f"{before}{'  ' if last else '│ '} {line}"

"""Commits that results were measured on, and marks for results of code that has changed since.

`outcome.give` writes the commit into a result. As a hook of mkdocs this marks each page that names
results of older code:

    > Measured on older code: data_parallel.json (4bf99140; changed since: collectives, parallel).

The code of a result is that of the packages of dure that its script imports. A result without a
commit was measured at the latest on the commit that last wrote its file. Without git nothing is
marked.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

_RESULT = re.compile(r"benchmarks/results/(\w+)\.json")


def commit(root: Path = ROOT) -> str | None:
    """Return the commit, with a + where its code was changed; None without git."""
    head = _git(root, "rev-parse", "--short=8", "HEAD")
    if not head:
        return None
    return head + (
        "+" if _git(root, "status", "--porcelain", "--", "src", "benchmarks/*.py") else ""
    )


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with a line below its title on each result of older code, for mkdocs."""
    found = dict.fromkeys(_RESULT.findall(markdown))
    older = [told for name in found if (told := older_than_code(ROOT, name)) is not None]
    if not older:
        return markdown
    title, line, rest = markdown.partition("\n")
    return f"{title}{line}\n> Measured on older code: {'; '.join(older)}.\n{rest}"


@cache
def older_than_code(root: Path, name: str) -> str | None:
    """Return the commit of a result and the packages changed since; None if none changed."""
    file = f"benchmarks/results/{name}.json"
    if not (root / file).is_file():
        return None
    said = json.loads((root / file).read_text())
    of = str(said.get("commit") or "").rstrip("+") if isinstance(said, dict) else ""
    if not of or _git(root, "cat-file", "-t", of) != "commit":
        of = _written(root).get(file, "")
    packages = sorted(packages_of(root, name))
    if not of or not packages:
        return None
    between = ("--name-only", "--no-renames", of, "HEAD", "--", "src/dure")
    changed = (_git(root, "diff-tree", "-r", *between) or "").splitlines()
    parts = {Path(each).relative_to("src/dure").parts[0] for each in changed}
    since = [package for package in packages if {package, f"{package}.py"} & parts]
    return f"{name}.json ({of}; changed since: {', '.join(since)})" if since else None


@cache
def _written(root: Path) -> dict[str, str]:
    """Return the newest commit that has written each result."""
    found: dict[str, str] = {}
    told = _git(root, "log", "--format=commit %h", "--name-only", "--", "benchmarks/results")
    of = ""
    for line in (told or "").splitlines():
        if line.startswith("commit "):
            of = line.removeprefix("commit ")
        elif line:
            found.setdefault(line, of)
    return found


def packages_of(root: Path, name: str) -> set[str]:
    """Return the packages of dure that the script of a result imports or names."""
    # A script may have several results, such as data_parallel_link.
    stems = [script.stem for script in (root / "benchmarks").glob("*.py")]
    script = max((stem for stem in stems if name.startswith(stem)), key=len, default=None)
    if script is None:
        return set()
    source = (root / "benchmarks" / f"{script}.py").read_text()
    return {module.split(".")[1] for module in _modules(ast.parse(source)) if "." in module}


def _modules(tree: ast.Module) -> Iterator[str]:
    from dure import _WHERE

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("dure."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dure."):
            yield str(node.module)
        elif isinstance(node, ast.ImportFrom) and node.module == "dure":
            yield from (_WHERE.get(alias.name, f"dure.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dure":
            yield _WHERE.get(node.attr, "")


def _git(root: Path, *arguments: str) -> str | None:
    """Return the output of git; None where it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None

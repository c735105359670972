"""Docstrings for the API reference: what each argument is becomes a list.

In the code they say `name: what it is`, in a line or in a sentence of its own. Markdown would run
these together. mkdocs.yml names this file, and griffe, which reads the code, calls it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from griffe import Extension, Object


def listed(text: str, names: Collection[str]) -> str:
    """The docstring with a point for each argument of these names; the rest stays as it is."""
    if not names:
        return text
    one = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    begins = re.compile(rf"(?:^|(?<=[.;)] ))((?:{one})(?:, (?:{one}))*): ")
    return "\n\n".join(_paragraph(part, begins) for part in text.split("\n\n"))


def _paragraph(part: str, begins: re.Pattern[str]) -> str:
    # What is indented is a formula; and Args is a list already, which griffe knows.
    lines = part.split("\n")
    if lines[0].startswith((" ", "Args:")):
        return part
    found = list(begins.finditer(" ".join(line.strip() for line in lines)))
    if not found:
        return part
    whole = found[0].string
    ends = [*(match.start() for match in found[1:]), len(whole)]
    before = whole[: found[0].start()].strip()
    points = [
        f"- **{match[1]}**: {whole[match.end() : end].strip()}"
        for match, end in zip(found, ends, strict=True)
    ]
    # What is raised is of the function, not of its last argument.
    points[-1] = re.sub(r"\. (Raises|Returns) ", r".\n\n\1 ", points[-1])
    return "\n\n".join([before, "\n".join(points)] if before else ["\n".join(points)])


class Fields(Extension):
    """Rewrites the docstring of each function and class as it is read."""

    def on_object(self, *, obj: Object, **given: Any) -> None:
        if obj.docstring is None or not (obj.is_function or obj.is_class):
            return
        names = {parameter.name.lstrip("*") for parameter in getattr(obj, "parameters", ())}
        obj.docstring.value = listed(obj.docstring.value, (names | set(obj.members)) - {"self"})

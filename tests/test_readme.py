"""Pictures and links of the README; what it shows is run by tests/test_snippets.py."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_pictures_of_the_readme_are_there_and_light() -> None:
    pictures = re.findall(r'src(?:set)?="([^"]+)"', (ROOT / "README.md").read_text())
    assert len(pictures) == 2
    for picture in pictures:
        assert (ROOT / picture).read_bytes()[:4] == b"\x89PNG"
        assert (ROOT / picture).stat().st_size < 300_000


def test_links_of_the_readme_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
            assert target.startswith("http") or (ROOT / target).exists(), f"{page}: {target}"

"""A library is not the user's own code, however it came here; what somebody works on is."""

from __future__ import annotations

import json
import os
import site
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dure.machine import libraries
from dure.machine.libraries import is_foreign_project, is_installed_copy


@pytest.fixture(autouse=True)
def _nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    cached = (libraries.installed_folders, libraries._copied_into, libraries._editable_projects)
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


def library_in(folder: Path) -> Path:
    (folder / "given").mkdir(parents=True)
    file = folder / "given" / "layers.py"
    file.touch()
    return file


def test_python_and_torch_are_installed_and_this_file_is_not() -> None:
    import torch

    assert is_installed_copy(Path(os.__file__))
    assert is_installed_copy(Path(torch.__file__))
    assert not is_installed_copy(Path(__file__))
    assert not is_foreign_project(Path(__file__))


def test_a_library_of_the_user_s_site_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path))
    assert is_installed_copy(library_in(tmp_path))


def test_what_pip_has_copied_into_a_folder_is_installed_and_its_neighbours_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = library_in(tmp_path)
    (tmp_path / "given-1.0.dist-info").mkdir()
    (tmp_path / "given-1.0.dist-info" / "RECORD").write_text("given/layers.py,sha256=x,0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    assert is_installed_copy(file)
    assert not is_installed_copy(tmp_path / "mine.py")


def editable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site_packages = tmp_path / "site-packages"
    (site_packages / "given-1.0.dist-info").mkdir(parents=True)
    project = tmp_path / "a project"
    said = {"url": project.as_uri(), "dir_info": {"editable": True}}
    (site_packages / "given-1.0.dist-info" / "direct_url.json").write_text(json.dumps(said))
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(site_packages))
    return library_in(project)


def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site_packages = tmp_path / "site-packages"
    site_packages.mkdir()
    (site_packages / "given.egg-link").write_text(f"{tmp_path / 'a project'}\n.")
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(site_packages))
    return library_in(tmp_path / "a project")


def on_python_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(tmp_path / "a project")]))
    return library_in(tmp_path / "a project")


@pytest.mark.parametrize("found", [editable, linked, on_python_path])
def test_what_lies_elsewhere_is_a_library_unless_somebody_works_there(
    found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = found(tmp_path, monkeypatch)
    assert not is_installed_copy(file)
    assert is_foreign_project(file)
    assert not is_foreign_project(tmp_path / "mine.py")
    for place in ("a project", "a project/given", "."):
        monkeypatch.chdir(tmp_path / place)
        assert not is_foreign_project(file)

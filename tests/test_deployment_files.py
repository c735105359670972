"""The files of examples/deployment say what there is: commands, options, keys, extras."""

from __future__ import annotations

import configparser
import contextlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from dure.cli.main import main
from dure.deploy.client import policy
from dure.deploy.client.policy import Policy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "deployment"
HARDENED = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "Restart": "on-failure",
    "SuccessExitStatus": "130",
    "RestartPreventExitStatus": "2",
}


def unit(name: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(FOLDER / name)
    return parser["Service"]


def options_are_known(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    names = [word for word in command if not word.startswith("-")][:3]
    if "--resume" in command:
        names = [command[0], "--resume", "RUN"]
    with contextlib.suppress(SystemExit):
        assert main([*names, "--help"]) == 0
    listed = capsys.readouterr().out
    assert [word for word in command if word.startswith("--") and word not in listed] == []


@pytest.mark.parametrize(
    ("name", "commands"), [("dure-server.service", 2), ("dure-client.service", 1)]
)
def test_a_unit_runs_commands_of_dure_and_gives_them_little(
    name: str, commands: int, capsys: pytest.CaptureFixture[str]
) -> None:
    service = unit(name)
    assert {key: service[key] for key in HARDENED} == HARDENED
    assert f"/var/lib/{service['StateDirectory']}" == service["WorkingDirectory"]
    found = re.findall(r"/opt/dure/bin/dure ([^;']+)", service["ExecStart"])
    assert len(found) == commands
    for command in found:
        options_are_known(shlex.split(command), capsys)


def test_the_commands_of_the_image_are_those_of_dure(capsys: pytest.CaptureFixture[str]) -> None:
    text = (FOLDER / "Containerfile").read_text()
    comments = re.sub(r"\\\n#", "", text)
    found = re.findall(r"^#.* dure +((?:serve|join) .*)$", comments, re.MULTILINE)
    assert len(found) == 2
    for command in found:
        options_are_known(shlex.split(command), capsys)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = re.findall(r"/src\[(\w+)\]", text)
    assert asked in project["optional-dependencies"]
    (constraints,) = re.findall(r"--constraint /src/(\S+)", text)
    assert (ROOT / constraints).is_file()


def test_the_policy_has_every_key_and_is_read() -> None:
    path = FOLDER / "policy.toml"
    assert list(tomllib.loads(path.read_text())) == list(policy._READERS)
    read = Policy.read(path)
    assert read.asks
    assert not read.share_errors
    assert read.memory == 4 * 10**9

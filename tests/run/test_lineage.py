"""Where a model comes from: signed by its server, and found out where it is not so."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

import dure
from dure.cli.main import main
from dure.errors import LineageError
from dure.record.run import load_run
from dure.record.settings import LINEAGE, config_digest
from dure.run.lineage import METADATA, signed, verify
from dure.wire.signatures import Key
from small import small_task

sys.path.insert(0, str(Path(__file__).parents[1] / "worlds" / "network"))
from federation import Federation


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[dure.Run, Path]:
    folder = tmp_path_factory.mktemp("signed") / "run"
    return Federation(2).run(folder, rounds=3), folder


@pytest.fixture
def copy(served, tmp_path) -> Path:
    return Path(shutil.copytree(served[1], tmp_path / "copy"))


def test_the_lineage_says_what_the_model_was_made_of(served) -> None:
    run, folder = served
    found = verify(folder)
    lineage = found.lineage
    assert lineage["task"]["title"] == "small"
    assert (lineage["system"]["name"], lineage["rounds"]) == ("fed-avg", 3)
    assert lineage["clients"] == {"gave_updates": 2, "numbers": [0, 1], "updates": 6}
    config = json.loads((folder / "config.json").read_text())
    assert lineage["run"] == config["run"]
    assert lineage["config_sha256"] == config_digest(config)
    # It travels with the weights, and with the run.
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()[METADATA]) == lineage
    assert json.loads(json.dumps(run.lineage)) == lineage
    assert load_run(folder, small_task().model).lineage == lineage


def test_names_of_clients_are_not_in_it(served) -> None:
    text = (served[1] / LINEAGE).read_text() + (
        served[1] / "model.safetensors"
    ).read_bytes().decode("latin1")
    assert '"c0"' not in text


def test_the_key_is_the_servers_and_stays_with_it(served) -> None:
    path = served[1] / "signing.key"
    assert path.stat().st_mode & 0o777 == 0o600
    key = Key.load_or_create(path)
    assert verify(served[1], key.public).key == key.public
    with pytest.raises(LineageError, match="not by"):
        verify(served[1], Key.make().public)


def test_a_model_with_a_bit_changed_is_found_out(copy) -> None:
    model = copy / "model.safetensors"
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    with pytest.raises(LineageError, match="not the signed model"):
        verify(model)


@pytest.mark.parametrize(
    ("what", "value"), [("rounds", 4), ("seed", 1), ("config_sha256", "0" * 64)]
)
def test_a_lineage_that_says_something_else_is_found_out(copy, what, value) -> None:
    said = json.loads((copy / LINEAGE).read_text())
    said["lineage"][what] = value
    (copy / LINEAGE).write_text(json.dumps(said))
    with pytest.raises(LineageError, match="changed after it was signed"):
        verify(copy)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"signature": "zz"}', '{"signature": "", "key": 3}']
)
def test_what_is_no_lineage_is_told_in_a_line(copy, text) -> None:
    (copy / LINEAGE).write_text(text)
    with pytest.raises(LineageError, match="not a signed lineage"):
        verify(copy)
    (copy / LINEAGE).unlink()
    with pytest.raises(LineageError, match="cannot read"):
        verify(copy)


def test_the_command_says_it_and_its_exit_status_too(served, copy, capsys) -> None:
    assert main(["verify", str(served[1])]) == 0
    said = capsys.readouterr().out
    assert "fed-avg" in said
    assert "2 sent 6 updates (0, 1)" in said
    (copy / "model.safetensors").write_bytes(b"another")
    assert main(["verify", str(copy)]) == 1
    assert "not the signed model" in capsys.readouterr().err


def sign(folder: Path, lineage: object) -> None:
    """Anybody's signature under anything."""
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    said = signed(lineage, digest, Key.make())  # type: ignore[arg-type]
    (folder / LINEAGE).write_text(json.dumps(said))


@pytest.mark.parametrize("lineage", [{}, [], "x", 3, {"versions": {}, "clients": 5}])
def test_what_is_signed_and_is_no_lineage_is_told_in_a_line(copy, capsys, lineage) -> None:
    sign(copy, lineage)
    assert main(["verify", str(copy)]) == 1
    said = capsys.readouterr()
    assert "is not the lineage of a model" in said.err
    assert "as it was signed" not in said.out


def test_a_lineage_cannot_write_over_what_is_said_of_it(copy, capsys) -> None:
    lineage = verify(copy).lineage
    forged = "\x1b[2J\x1b[Hfed\nunchanged since it was signed by 00ff"
    sign(copy, {**lineage, "system": {"name": forged}, "run": forged})
    assert main(["verify", str(copy / "model.safetensors")]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert (
        len(
            [line for line in said.splitlines() if line.startswith("unchanged since it was signed")]
        )
        == 1
    )


def test_a_simulated_run_is_not_signed(tmp_path) -> None:
    strategy = dure.FedAvg(clients=2, batch_size=4)
    run = dure.train(small_task(), strategy, stop=dure.Stop(rounds=1), out=tmp_path / "run")
    assert run.lineage is None
    assert not (tmp_path / "run" / LINEAGE).exists()

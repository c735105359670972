"""Settings of systems that `dure compare` takes once, as flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dure.cli.main import main
from dure.cli.shared_flags import shared

OWN = {"rounds", "seed", "json", "help"}


def test_a_flag_is_given_to_all_systems_that_have_it() -> None:
    systems = ["fed-avg", "fed-prox,clients=5", "data-parallel"]
    flags = ["--clients", "20", "--rounds", "3", "--batch-size=7", "--drop-out", "0.1", "--json"]
    given = shared(systems, flags, OWN)
    assert given.systems == [
        "fed-avg,clients=20,batch_size=7,drop_out=0.1",
        "fed-prox,clients=5,batch_size=7,drop_out=0.1",
        "data-parallel,batch_size=7",
    ]
    assert given.flags == ["--rounds", "3", "--json"]
    assert given.notes == [
        "--clients 20 applies to fed-avg, fed-prox; data-parallel does not have this setting",
        "--drop-out 0.1 applies to fed-avg, fed-prox; data-parallel does not have this setting",
    ]


def test_a_truth_value_needs_no_value_and_a_list_may_have_commas() -> None:
    flags = ["--equal-weights", "--mu", "-0.5"]
    assert shared(["fed-prox"], flags, OWN).systems == ["fed-prox,equal_weights=true,mu=-0.5"]
    given = shared(["split"], ["--cut", '["1","2"]'], OWN)
    assert given.systems == ['split,cut=["1","2"]']


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--clietns", "3"],
            "nor any of the compared systems has a flag --clietns, .* mean '--clients'",
        ),
        (["--clients"], "--clients is a setting of systems and needs one value"),
        (["--clients", "--rounds", "3"], "--clients is a setting of systems and needs one value"),
        (["--partition", "iid,mu=3"], "--partition is a setting of systems and needs one value"),
        (["--ranks", "3"], "nor any of the compared systems has a flag --ranks"),
    ],
)
def test_what_nobody_has_or_has_no_value_is_refused(flags, message) -> None:
    with pytest.raises(ValueError, match=message):
        shared(["fed-avg", "fed-prox"], flags, OWN)


def test_systems_are_compared_with_what_they_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "both"
    shared_ones = ["--clients", "7", "--devices", "lognormal:1"]
    asked = ["compare", "digits", "fed-avg", "fed-prox,clients=3", *shared_ones, "--rounds", "1"]
    assert main([*asked, "--json", "--out", str(out)]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["workers"] for run in runs] == [7, 3]
    for config in out.glob("*/config.json"):
        assert json.loads(config.read_text())["world"]["devices"] == "lognormal:1.0"

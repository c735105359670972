"""What the terminal shows."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dure.cli.show import Display, facts, fraction_done, human_bytes, table
from dure.contracts.stop import Stop
from dure.report.formatting import duration


def event(step: int = 12, unit: str = "step", **changes):
    metrics = {"test_loss": 0.5, "test_accuracy": 0.953}
    base = {
        "unit": unit,
        "step": step,
        "epoch": 1.5,
        "samples": 48_200,
        "seconds": 2.0,
        "loss": 0.31,
        "metrics": metrics,
        "evaluated": step,
        "proofs": [],
    }
    return {**base, **changes}


def summary(label: str, **changes):
    base = {
        "label": label, "world": "2 processes", "test_accuracy": 0.9, "test_loss": 0.5,
        "epochs": 5.0, "best": {"test_loss": 0.4, "test_accuracy": 0.95}, "seconds": 3.1,
        "bytes_sent_per_worker": 1_234_567.0, "peak_memory": 301_504_128, "to_target": {},
        "idle_share": 0.25,
    }  # fmt: skip
    return {**base, **changes}


def printed(*summaries) -> str:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="standard")
    console.print(table(summaries))
    return console.file.getvalue()


def cells(*summaries) -> list[list[str]]:
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed(*summaries))
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


def test_facts_are_one_line():
    assert facts(event()) == "step 12 · loss 0.31 · test_accuracy 0.953 · 24,100 samples/s"
    assert facts(event(0, seconds=0.0, loss=None, metrics={})) == "step 0"


def test_what_a_run_tells_of_anybody_is_in_its_line_and_its_row():
    assert " · epsilon 1.516 · " in facts(event(numbers={"epsilon": 1.5157, "updates": 3.0}))
    # Without noise there is no bound, and no number.
    assert "epsilon" not in facts(event(numbers={"epsilon": None}))
    heading, private, plain = cells(
        summary("private", numbers={"epsilon": 7.99762}), summary("plain", numbers=None)
    )
    place = heading.index("epsilon")
    assert (private[place], plain[place]) == ("7.998", "–")
    assert "epsilon" not in cells(summary("plain"))[0]


def test_a_shuffle_has_columns_beside_runs_that_need_none():
    mixed = summary("mixed", workers=2, shuffle_bytes=4_000_000, shuffle_seconds=0.5)
    none = summary("ADMM", workers=2, shuffle_bytes=0, shuffle_seconds=0.0)
    heading, one, other = cells(mixed, none)
    place = heading.index("shuffled per worker")
    assert one[place : place + 2] == ["2 MB", "250 ms"]
    assert other[place : place + 2] == ["0 B", "0 s"]
    assert "shuffled per worker" not in cells(none)[0]


@pytest.mark.parametrize(
    ("stop", "unit", "expected"),
    [
        (Stop(steps=24), "step", 0.5),
        (Stop(rounds=24), "step", None),
        (Stop(rounds=24), "round", 0.5),
        (Stop(epochs=3, seconds=2.5), "step", 0.8),
        (Stop(steps=6), "step", 1.0),
        (Stop(target={"test_loss": 0.1}), "step", None),
    ],
)
def test_the_nearest_limit_says_how_much_is_done(stop, unit, expected):
    assert fraction_done(stop, event(unit=unit)) == expected


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1_234_567, "1.23 MB"), (999_999, "1 MB"),
        (301_504_128, "302 MB"), (5e12, "5 TB"), (1.25e16, "12,500 TB"),
    ],
)  # fmt: skip
def test_bytes_are_told_with_three_digits(count, text):
    assert human_bytes(count) == text


@given(st.just(0.0) | st.floats(0.01, 1e18))
def test_bytes_are_never_told_in_powers_of_ten(count):
    assert "e" not in human_bytes(count)


def test_seconds_become_minutes():
    assert [duration(s) for s in (0.0, 3.14159, 99.99, 150, 3600)] == [
        "0 s",
        "3.14 s",
        "100 s",
        "2 min 30 s",
        "1 h 00 min",
    ]


def test_a_row_tells_metrics_time_bytes_and_memory():
    heading, row = cells(summary("ring ×2"))
    assert heading == [
        "system",
        "in",
        "test accuracy",
        "test loss",
        "epochs",
        "time",
        "sent per worker",
        "peak memory",
        "idle (over busy)",
    ]
    numbers = ["0.9000", "0.5000", "5", "3.10 s", "1.23 MB", "302 MB", "25 % (0.33)"]
    assert row == ["ring ×2", "2 processes", *numbers]


def test_a_target_gets_a_column_and_what_is_missing_a_dash():
    reached = summary("a", to_target={"test_accuracy": {"target": 0.95, "reached": 311.52}})
    missed = summary(
        "b", test_accuracy=None, to_target={"test_accuracy": {"target": 0.95, "reached": None}}
    )
    heading, first, second = cells(reached, missed)
    assert heading[-1] == "until test accuracy 0.95"
    assert (first[-1], second[-1], second[2]) == ("311.5", "–", "–")


def test_the_best_of_several_is_bold():
    text = printed(
        summary("a", test_accuracy=0.9, test_loss=0.3),
        summary("b", test_accuracy=0.8, test_loss=0.2),
    )
    assert set(re.findall(r"\x1b\[1m(.*?)\x1b\[0m", text)) == {"0.9000", "0.2000"}


def test_real_and_virtual_seconds_share_no_column():
    simulated = [
        summary("a", seconds=9.0, numbers={"virtual_seconds": 70.0}),
        summary("b", seconds=1.0, numbers={"virtual_seconds": 80.0}),
    ]
    heading, first, second, real = cells(*simulated, summary("real", seconds=5.0))
    places = [heading.index(name) for name in ("time", "virtual time", "simulated in")]
    assert [[row[place] for place in places] for row in (first, second, real)] == [
        ["–", "70.0 s", "9.00 s"],
        ["–", "80.0 s", "1.00 s"],
        ["5.00 s", "–", "–"],
    ]
    bold = set(re.findall(r"\x1b\[1m(.*?)\x1b\[0m", printed(*simulated)))
    assert bold == {"70.0 s"}, "how long a simulation took is nobody's merit"
    assert "time" not in cells(*simulated)[0]


def test_a_label_may_have_brackets():
    assert cells(summary("[run] [/of mine]"))[1][0] == "[run] [/of mine]"


def test_without_a_terminal_progress_is_a_plain_line(capsys):
    with Display(Stop(steps=24)) as display:
        display("training", event())
        display("training", event(13))
        display("training", event(24))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f" 50% training: {facts(event())}",
        f"100% training: {facts(event(24))}",
    ]


def test_what_was_proven_is_told_once_with_its_time(capsys):
    proofs = [("the trace computes what the model computes", 0.42)]
    with Display(Stop(steps=24)) as display:
        display("pipeline", event(proofs=proofs))
        display("pipeline", event(24, proofs=proofs))
    assert capsys.readouterr().err.splitlines() == [
        "pipeline: the trace computes what the model computes (tried in 420 ms)",
        f" 50% pipeline: {facts(event())}",
        f"100% pipeline: {facts(event(24))}",
    ]


def test_a_quiet_display_says_nothing(capsys):
    with Display(Stop(steps=24), quiet=True) as display:
        display("training", event(24))
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_each_run_has_a_line_of_its_own():
    display = Display(Stop(epochs=3))
    display.console = Console(file=io.StringIO(), force_terminal=True, width=120)
    display.live.live.console = display.console
    with display:
        display("[one]", event())
        display("two", event())
    text = display.console.file.getvalue()
    assert "[one]" in text
    assert "50%" in text
    assert "test_accuracy 0.953" in text


PERSONAL = {
    f"{who}_{what}": 0.6724
    for who in ("client", "personal")
    for what in ("accuracy", "accuracy_p10", "loss")
}


@given(
    st.integers(70, 220),
    st.sampled_from(["FedAvg", "FedAvg iid, devices stragglers:0.2, drop out 0.3"]),
)
def test_a_table_never_cuts_a_number_and_says_what_it_leaves_out(width, label):
    runs = [
        summary(label, best={"test_loss": 0.4, **PERSONAL}, **PERSONAL),
        summary("pipeline gpipe, 4 micro-batches"),
    ]
    console = Console(file=io.StringIO(), width=width)
    console.print(table(runs, console))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in console.file.getvalue()
    words = console.file.getvalue().split()
    assert "0.9000" in words
    assert ("1.23" in words) == ("room" not in words or "sent" not in words[words.index("room") :])


def test_the_conditions_of_clients_are_told_once():
    world = "simulated clients, devices stragglers:0.2"
    assert cells(summary("FedAvg iid, devices stragglers:0.2", world=world))[1][1] == "simulated"


def test_batch_and_steps_have_columns_and_a_line_says_what_is_not_alike():
    amount = {"batch": 64.0, "local": False, "steps": 460.0, "epochs": 20.0, "learning_rate": 0.1}
    joint = summary("ring", training_amount=amount)
    local = summary("local SGD", training_amount={**amount, "batch": 32.0, "local": True})
    unknown = summary("mine", training_amount={})
    heading, *rows = cells(joint, local, unknown)
    place = heading.index("batch")
    assert heading[place : place + 3] == ["batch", "steps", "epochs"]
    # Below the rows of runs is the line.
    assert [row[place : place + 2] for row in rows[:3]] == [
        ["64", "460"],
        ["32 local", "460"],
        ["–", "–"],
    ]
    assert "Not alike: batch 64, but 32 in local SGD." in table([joint, local, unknown]).caption
    assert "Not alike" not in (table([joint, unknown]).caption or "")


def test_an_amount_that_another_version_wrote_is_shown_as_far_as_it_is_known():
    later = summary("later", training_amount={"batch": 64.0, "steps": 460.0, "tokens": 1e9})
    other = summary("other", training_amount=["of another form"])
    heading, *rows = cells(later, other)
    place = heading.index("batch")
    assert [row[place : place + 2] for row in rows[:2]] == [["64", "460"], ["–", "–"]]


def test_the_worker_that_sent_more_than_the_mean_is_named():
    ranks = [
        {"name": f"rank {rank}", "bytes_sent": sent} for rank, sent in ((0, 15_240_000), (1, 1))
    ]
    heading, row = cells(summary("master", bytes_sent_per_worker=7_620_000.0, per_worker=ranks))
    assert row[heading.index("sent per worker")] == "7.62 MB (rank 0: 15.2 MB)"


def test_batch_and_steps_stay_where_metrics_of_clients_have_no_space():
    clients = {f"client_accuracy_{place}": 0.5 for place in range(8)}
    amount = {"batch": 64.0, "local": False, "steps": 460.0}
    one = summary("fed-avg", training_amount=amount, **clients)
    one["best"] = {**one["best"], **clients}
    console = Console(width=120)
    shown = [column.header for column in table([one], console).columns]
    assert {"test accuracy", "batch", "steps", "epochs"} <= set(shown)
    assert "idle (over busy)" not in shown

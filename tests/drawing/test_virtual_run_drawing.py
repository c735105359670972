"""Pictures of servers and clients show runs under the virtual clock."""

from __future__ import annotations

import pytest

from dure.drawing.downpour import downpour_round
from dure.drawing.fed_avg import fed_avg_rounds
from dure.drawing.lanes import LanePanel, LaneSpan, covered, lanes_picture
from dure.drawing.options import (
    DownpourDrawing,
    FedAvgDrawing,
    ParameterServerDrawing,
    SplitDrawing,
)
from dure.drawing.parameter_server import parameter_server_picture, server_round
from dure.drawing.split import VARIANTS, split_picture, split_round


def computing(panel: LanePanel, lane: str) -> list[LaneSpan]:
    return [span for span in panel.spans if span.lane == lane and span.kind == "f"]


def test_synchronous_workers_make_the_same_steps_and_wait_for_the_slow_one() -> None:
    drawn = server_round(
        0, ParameterServerDrawing(workers=3, steps=4, slow=1, factor=2.0, transfer=0.0)
    )
    panel = drawn.panel
    assert [len(computing(panel, f"worker {number}")) for number in range(3)] == [4, 4, 4]
    # Without transfers a step lasts as long as the slow worker's gradient.
    assert drawn.seconds == pytest.approx(4 * 2.0)
    assert drawn.waiting == pytest.approx(1 - (1 + 1 + 2) / 6)
    assert drawn.staleness == 0
    pushes = [arrow for arrow in panel.arrows if arrow.kind == "b"]
    pulls = [arrow for arrow in panel.arrows if arrow.kind == "c"]
    assert (len(pushes), len(pulls)) == (12, 12)


def test_asynchronous_workers_do_not_wait_for_the_slow_one() -> None:
    bound = server_round(0, ParameterServerDrawing(workers=3, steps=4))
    free = server_round(None, ParameterServerDrawing(workers=3, steps=4))
    assert free.waiting < bound.waiting
    assert free.staleness > 0
    fast, _, slow = (len(computing(free.panel, f"worker {number}")) for number in range(3))
    assert fast > slow


def test_bounded_workers_are_not_further_ahead_than_the_bound() -> None:
    panel = server_round(1, ParameterServerDrawing(workers=2, steps=6, slow=1, factor=4.0)).panel
    fast = computing(panel, "worker 0")
    slow = computing(panel, "worker 1")
    for step, span in enumerate(fast[2:], 2):
        # A step begins after the slow worker has finished all but the last one before it.
        assert span.start >= slow[step - 2].end


def test_replicas_compute_beside_their_messages() -> None:
    drawn = downpour_round(
        DownpourDrawing(fetch_every=2, push_every=2, replicas=3, steps=6, slow=1, factor=2.0)
    )
    for number, seconds in enumerate((1.0, 1.0, 2.0)):
        spans = computing(drawn.panel, f"replica {number}")
        assert len(spans) == 6
        # After the first fetch nothing stops a replica.
        assert spans[-1].end - spans[0].start == pytest.approx(6 * seconds)
    pushes = [arrow for arrow in drawn.panel.arrows if arrow.kind == "b"]
    # Of a replica after the steps 0, 2, 4, and the rest at the end of the round.
    assert len(pushes) == 3 * 4


def test_a_deadline_ends_a_round_without_the_straggler() -> None:
    waits = fed_avg_rounds(FedAvgDrawing(clients=5, rounds=2, slow=1, factor=3.0, transfer=0.25))
    ends = fed_avg_rounds(
        FedAvgDrawing(clients=5, rounds=2, slow=1, factor=3.0, transfer=0.25, deadline=2.5)
    )
    # Download, training and upload of the straggler, twice.
    assert waits.panel.end == pytest.approx(2 * (0.25 + 3 + 0.25))
    assert waits.waiting == pytest.approx(4 * 2.0 / (5 * 3.5))
    assert (waits.late, ends.late) == (0, 1)
    assert ends.panel.end == pytest.approx(2.5 + 0.25 + 1 + 0.25)
    assert ends.waiting < waits.waiting


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_go_up_and_gradients_come_down(variant: str) -> None:
    drawn = split_round(variant, SplitDrawing(clients=3, steps=2))
    values = [arrow for arrow in drawn.panel.arrows if arrow.kind == "f"]
    gradients = [arrow for arrow in drawn.panel.arrows if arrow.label == "gradients"]
    twice = 2 if variant == "u-shaped" else 1
    assert len(values) == len(gradients) == 3 * 2 * twice
    heads = [span for span in drawn.panel.spans if span.label == "head"]
    assert [sum(span.kind == kind for span in heads) for kind in "fb"] == [6, 6]
    # A backward takes twice as long as its forward.
    for lane in drawn.panel.waiting:
        own = sorted((span for span in heads if span.lane == lane), key=lambda span: span.start)
        assert [span.kind for span in own] == ["f", "b", "f", "b"]
        for forward, backward in zip(own[::2], own[1::2], strict=True):
            assert backward.end - backward.start == pytest.approx(2 * (forward.end - forward.start))


def test_peers_hand_over_the_head_without_the_server() -> None:
    direct = split_round("peer-to-peer", SplitDrawing(clients=3, steps=1))
    weights = [arrow for arrow in direct.panel.arrows if arrow.kind == "c"]
    assert [(one.source, one.target) for one in weights] == [
        ("client 0", "client 1"),
        ("client 1", "client 2"),
    ]
    through = split_round("vanilla", SplitDrawing(clients=3, steps=1))
    weights = [arrow for arrow in through.panel.arrows if arrow.kind == "c"]
    assert {"server"} < {name for one in weights for name in (one.source, one.target)}
    assert all("server" in (one.source, one.target) for one in weights)


def test_the_figures_are_printed_in_both_forms() -> None:
    drawn = server_round(0, ParameterServerDrawing(workers=2, steps=3))
    picture = parameter_server_picture([0], ParameterServerDrawing(workers=2, steps=3))
    for text in (picture.svg, picture.text()):
        assert f"{100 * drawn.waiting:.1f} %" in text
    split = split_round("vanilla", SplitDrawing(clients=2, steps=1))
    nbytes = sum(one.nbytes for one in split.transmissions)
    assert (
        f"{nbytes:,} bytes" in split_picture(["vanilla"], SplitDrawing(clients=2, steps=1)).text()
    )


def test_the_waiting_share_counts_overlapping_activities_once() -> None:
    assert covered([(0, 2), (1, 3), (5, 6)]) == 4
    spans = (LaneSpan("a", "f", 0, 2), LaneSpan("a", "c", 1, 3))
    panel = LanePanel("", ("a",), spans, (), ("a",), 4)
    assert panel.waiting_share() == 0.25
    text = lanes_picture("A", "b", [("f", "work"), ("idle", "idle")], [panel], (), 43).text()
    (row,) = [line for line in text.splitlines() if line.startswith("a ")]
    assert row.count("·") == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 0}, "--workers is 0: give 1 to 16"),
        ({"steps": 99}, "--steps is 99"),
        ({"slow": 4}, "--slow is 4: give 0 to 3"),
        ({"factor": 0.5}, "--factor is 0.5: give 1 or more"),
        ({"transfer": float("inf")}, "--transfer is inf"),
        ({"staleness": -1}, "staleness is -1"),
    ],
)
def test_a_round_that_cannot_be_drawn_is_refused(change: dict[str, float], message: str) -> None:
    others = dict(change)
    staleness = others.pop("staleness", 0)
    with pytest.raises(ValueError, match=message):
        server_round(staleness, ParameterServerDrawing(**others))  # type: ignore[arg-type]


def test_other_wrong_values_are_refused() -> None:
    with pytest.raises(ValueError, match="--deadline is 0"):
        fed_avg_rounds(FedAvgDrawing(deadline=0.0))
    with pytest.raises(ValueError, match="--clients is 0"):
        fed_avg_rounds(FedAvgDrawing(clients=0))
    with pytest.raises(ValueError, match="did you mean 'vanilla'"):
        split_round("vanila", SplitDrawing())
    with pytest.raises(ValueError, match="--push-every is 0"):
        downpour_round(DownpourDrawing(push_every=0))

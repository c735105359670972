"""What clients measure becomes metrics that the task has, and no others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dure.federated.server.client_metrics import ClientMeasurements
from dure.protocol.messages import EvaluationResults
from dure.record.history import SPREAD, WHOSE
from dure.tasks.builtin import load_task

NAMES = st.text(max_size=30) | st.sampled_from(
    ["test_accuracy", "test_loss", "epsilon", "client_accuracy", "client_loss", "client_other"]
)


@given(values=st.dictionaries(NAMES, st.floats(0, 1), max_size=6))
def test_a_name_that_no_client_was_asked_for_is_no_metric(values: dict[str, float]) -> None:
    said = ClientMeasurements(load_task("digits").measures)
    found = said.take(EvaluationResults([0], {name: [value] for name, value in values.items()}))
    metrics = [whose + name for whose in WHOSE for name in ("loss", "accuracy")]
    allowed = {name + suffix for name in metrics for suffix in ("", *SPREAD)}
    assert set(found) <= allowed
    assert set(said.measured.values) <= set(metrics)

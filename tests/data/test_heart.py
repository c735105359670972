"""The heart disease reader."""

from __future__ import annotations

import pytest
import torch

from dure.data.heart import FEATURES, FILES, HOSPITALS, read_heart
from dure.errors import DataError

COMPLETE = "63.0,1.0,1.0,{pressure}.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"
INCOMPLETE = "35,0,4,?,0,?,?,130,1,?,?,?,7,3"


@pytest.fixture
def folder(tmp_path):
    for file in FILES:
        rows = [COMPLETE.format(pressure=100 + 10 * i) for i in range(5)] + [INCOMPLETE] * 5
        (tmp_path / file).write_text("\n".join(rows) + "\n")
    return tmp_path


def column(examples, name):
    return examples.inputs[:, FEATURES.index(name)]


def test_patients_carry_their_hospital_and_a_fifth_of_each_is_held_out(folder):
    train, test = read_heart(folder)
    assert train.inputs.shape == (32, 29)
    assert sorted(test.keys) == sorted(HOSPITALS * 2)
    assert sorted(test.targets.tolist()) == [0] * 4 + [1] * 4
    assert train.classes == ["healthy", "heart disease"]


def test_the_split_is_a_function_of_its_seed(folder):
    assert torch.equal(read_heart(folder)[1].inputs, read_heart(folder)[1].inputs)
    assert any(
        not torch.equal(read_heart(folder, 0)[1].inputs, read_heart(folder, seed)[1].inputs)
        for seed in (1, 2, 3)
    )


def test_continuous_features_are_standardised_by_the_training_patients(folder):
    train, _ = read_heart(folder)
    age = column(train, "age")
    assert age.mean().abs() < 1e-6
    assert abs(age.std(correction=0) - 1) < 1e-6


def test_a_missing_number_becomes_the_median_and_is_marked(folder):
    train, _ = read_heart(folder)
    missing = column(train, "trestbps missing").bool()
    assert torch.equal(missing, train.targets.bool())
    known = column(train, "trestbps")[~missing].double().numpy()
    imputed = column(train, "trestbps")[missing].unique()
    assert len(imputed) == 1
    assert sorted(known)[len(known) // 2 - 1] <= imputed.item() <= sorted(known)[len(known) // 2]


def test_a_cholesterol_of_zero_is_missing(folder):
    train, _ = read_heart(folder)
    assert torch.equal(column(train, "chol missing").bool(), train.targets.bool())


def test_a_missing_category_is_zero_in_all_of_its_columns(folder):
    train, _ = read_heart(folder)
    slope = torch.stack([column(train, f"slope={value}") for value in (1, 2, 3)], dim=1)
    assert torch.equal(slope.sum(dim=1).bool(), ~train.targets.bool())
    assert torch.equal(column(train, "thal=7").bool(), train.targets.bool())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("1,2,3\n", "line 1: 3 values, expected 14"),
        (
            INCOMPLETE + "\n" + INCOMPLETE.replace("35", "old"),
            "line 2: a value is neither a number nor",
        ),
        (INCOMPLETE[:-1] + "?", "the last one known"),
        ("", "has no patients"),
    ],
)
def test_a_line_that_is_no_patient_is_named(folder, content, complaint):
    (folder / FILES[2]).write_text(content)
    with pytest.raises(DataError, match=complaint) as caught:
        read_heart(folder)
    assert FILES[2] in str(caught.value)


def test_a_missing_file_is_a_data_error(folder):
    (folder / FILES[0]).unlink()
    with pytest.raises(DataError, match="No such file"):
        read_heart(folder)

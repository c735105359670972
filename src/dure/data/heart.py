"""The UCI heart disease data: 920 patients of four hospitals.

The hospitals may not show each other their patients. 13 features and the diagnosis `num` (0: no
vessel narrowed by half; 1-4: some). The label is num > 0. The hospital is the key: cleveland 303
patients, hungarian 294, switzerland 123, va 200.

The features become 29 columns in this order; every estimated number (median, mean, deviation) is
estimated on the training patients only, of all hospitals together:

- age, trestbps, chol, thalach, oldpeak, ca: missing values become the median, then (x - mean) /
  deviation.
- sex, fbs, exang are 0 or 1: missing values become the median, which for 0 and 1 is the more
  frequent value.
- cp, restecg, slope, thal are categories: a column for each category; a missing value is zero in
all
  of them. With a bias in the model this is equivalent to a category "missing".
- a column for each of trestbps, chol, fbs, thalach, exang, oldpeak, ca that is 1 if the value was
  missing. Missingness depends on the hospital (`ca` is known in Cleveland), so values are not
  missing at random, and the median must not hide that.

A blood pressure or a cholesterol of 0 is a missing value too: no living patient has it, and in
Switzerland and at the VA it was written for unknown.

A fifth of the patients is held out for testing, stratified by hospital and label, always the same.
A federation would compute the means over all hospitals with secure aggregation before training.

Sources: A. Janosi, W. Steinbrunn, M. Pfisterer, R. Detrano, "Heart Disease", UCI Machine Learning
Repository, 1989, https://doi.org/10.24432/C52P4X; R. Detrano et al., American Journal of Cardiology
64, 1989, 304-310. As federated data: J. Ogier du Terrail et al., "FLamby", NeurIPS 2022, which
drops incomplete features.
"""

from __future__ import annotations

from itertools import chain, product
from pathlib import Path

import numpy as np
import torch

from dure.data.examples import Examples
from dure.data.holdout import hold_out
from dure.errors import DataError

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
FILES = tuple(f"processed.{hospital}.data" for hospital in HOSPITALS)
CLASSES = ("healthy", "heart disease")

_COLUMNS = (
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg",
    "thalach", "exang", "oldpeak", "slope", "ca", "thal", "num",
)  # fmt: skip
_CONTINUOUS = ("age", "trestbps", "chol", "thalach", "oldpeak", "ca")
_BINARY = ("sex", "fbs", "exang")
_CATEGORIES = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "slope": (1, 2, 3), "thal": (3, 6, 7)}
_MAY_MISS = ("trestbps", "chol", "fbs", "thalach", "exang", "oldpeak", "ca")
_ZERO_IS_MISSING = ("trestbps", "chol")

_ONE_HOT = tuple(
    chain.from_iterable(product([name], values) for name, values in _CATEGORIES.items())
)
"""(feature, category) of each column that is 1 for a category."""

FEATURES = (
    *_CONTINUOUS,
    *_BINARY,
    *(f"{name}={value}" for name, value in _ONE_HOT),
    *(f"{name} missing" for name in _MAY_MISS),
)
"""Names of the columns of the inputs."""


def read_heart(folder: Path | str, split_seed: int = 0) -> tuple[Examples, Examples]:
    """Return (training, test) examples.

    inputs: float32 of shape (n, 29). targets: int64 in {0, 1}. keys: the hospitals. Raises
    DataError if any of the four files cannot be read or has an invalid line.
    """
    tables = [_table(Path(folder) / file) for file in FILES]
    patients = np.concatenate(tables)
    keys: list[str] = []
    for hospital, table in zip(HOSPITALS, tables, strict=True):
        keys += [hospital] * len(table)
    labels = torch.from_numpy(patients[:, _COLUMNS.index("num")] > 0).long()
    train, test = hold_out(list(zip(keys, labels.tolist(), strict=True)), 0.2, split_seed)
    inputs = torch.from_numpy(_features(patients, train.numpy())).float()

    def examples(part: torch.Tensor) -> Examples:
        return Examples(inputs[part], labels[part], [keys[i] for i in part.tolist()], CLASSES)

    return examples(train), examples(test)


def _table(file: Path) -> np.ndarray:
    """Return float64 of shape (patients, 14), with NaN for missing values."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise DataError(f"{file} cannot be read: {reason}") from error
    rows = [_patient(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise DataError(f"{file} has no patients")
    return np.array(rows)


def _patient(file: Path, number: int, line: str) -> list[float]:
    values = line.split(",")
    try:
        numbers = [float("nan") if value.strip() == "?" else _number(value) for value in values]
    except ValueError as error:
        raise DataError(
            f"{file}, line {number}: a value is neither a number nor '?': {line!r}"
        ) from error
    # `not >= 0` is also true of NaN: a patient without a diagnosis is invalid.
    if len(numbers) != len(_COLUMNS) or not numbers[-1] >= 0:
        raise DataError(
            f"{file}, line {number}: {len(numbers)} values, expected {len(_COLUMNS)} "
            f"({', '.join(_COLUMNS)}), the last one known: {line!r}"
        )
    return numbers


def _number(text: str) -> float:
    """Return a number. Raises ValueError for a malformed or implausible number."""
    number = float(text)
    # Rejects NaN and infinity too, which `float` accepts.
    if not abs(number) < 1e6:
        raise ValueError(text)
    return number


def _features(patients: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Return the columns `FEATURES` of all patients, estimated on the patients at `train`."""
    column = {name: patients[:, i].copy() for i, name in enumerate(_COLUMNS)}
    # Before any estimate: a zero that means missing must be in no median.
    for name in _ZERO_IS_MISSING:
        column[name][column[name] == 0] = np.nan
    one_hot = [column[name] == value for name, value in _ONE_HOT]
    missing = [np.isnan(column[name]) for name in _MAY_MISS]
    continuous = [_standardised(_imputed(column[name], train), train) for name in _CONTINUOUS]
    binary = [_imputed(column[name], train) for name in _BINARY]
    return np.column_stack([*continuous, *binary, *one_hot, *missing])


def _imputed(values: np.ndarray, train: np.ndarray) -> np.ndarray:
    known = values[train][~np.isnan(values[train])]
    # Without a known value among the training patients there is no median.
    return np.where(np.isnan(values), np.median(known) if known.size else 0.0, values)


def _standardised(values: np.ndarray, train: np.ndarray) -> np.ndarray:
    deviation = values[train].std()
    standardised: np.ndarray = (values - values[train].mean()) / (
        deviation if deviation > 0 else 1.0
    )
    return standardised

"""The 1,797 handwritten digits that come with scikit-learn: real images without a download.

8x8 pixels with values 0..16, each the number of ink pixels in a 4x4 block of a 32x32 bitmap; 43
people's writing. The pixels are scaled to [0, 1] and not changed otherwise; 360 images (20 %,
stratified by digit) are held out for testing, always the same.

The file is read directly, since importing scikit-learn takes longer than a first training run.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998, https://doi.org/10.24432/C50P49 (its test set).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from dure.data.examples import Examples
from dure.data.holdout import hold_out
from dure.errors import DataError

CLASSES = [str(digit) for digit in range(10)]


def read_digits(split_seed: int = 0) -> tuple[Examples, Examples]:
    """Return (training, test) examples: 1437 and 360 digits.

    inputs: float32 of shape (n, 1, 8, 8) in [0, 1]. targets: int64 of shape (n,). Raises DataError
    if scikit-learn is not installed.
    """
    table = _table()
    images = torch.from_numpy(table[:, :-1]).float().reshape(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(table[:, -1]).long()
    train, test = hold_out(labels.tolist(), 0.2, split_seed)
    return (
        Examples(images[train], labels[train], classes=CLASSES),
        Examples(images[test], labels[test], classes=CLASSES),
    )


def _table() -> np.ndarray:
    """Return the 1797 rows of 64 pixels and a label."""
    # find_spec does not import a top-level package, it only finds its folder.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError(
            "the digits come with scikit-learn, which is not installed: pip install scikit-learn"
        )
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    # The path is an internal of scikit-learn: if the file has moved, its function is used.
    if file.is_file():
        return np.loadtxt(file, delimiter=",", dtype=np.int64)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return np.column_stack([pixels, labels]).astype(np.int64)

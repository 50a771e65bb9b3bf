"""Rows of a planted linear model in files of libsvm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import dump_svmlight_file


def planted_files(folder: Path, draw: np.random.Generator, rows: int, features: int) -> dict[str, str]:
    """Write rows for training and for validation; return the files by purpose."""
    planted = draw.normal(size=features) * 2
    found = {}
    for name in ("train", "validation"):
        values = draw.normal(size=(rows, features)) * (draw.random((rows, features)) < 0.2)
        targets = np.where(draw.random(rows) < 1 / (1 + np.exp(-values @ planted)), 1, -1)
        found[name] = str(folder / f"{name}.libsvm")
        dump_svmlight_file(values, targets, found[name])
    return found

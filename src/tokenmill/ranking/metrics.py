"""How good scores are, as MLPerf's DLRMv3 has it: normalised entropy, accuracy, grouped AUC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

_ETA = 1e-12


class RankMetrics(NamedTuple):
    """In percent, as the benchmark prints them; entropy is better when lower.

    None is not defined: entropy where all labels are the same, GAUC where no request has an area.
    """

    ne: float | None
    accuracy: float
    gauc: float | None


def rank_metrics(scores: Sequence[ArrayLike], labels: Sequence[ArrayLike]) -> RankMetrics:
    """Of the requests' scores [candidates] in (0, 1) and labels [candidates], 0 or 1."""
    found, known = [np.asarray(s) for s in scores], [np.asarray(t) for t in labels]
    every, truth = np.concatenate(found).astype(float), np.concatenate(known).astype(float)
    right = ((every >= 0.5) == (truth == 1)).mean()
    areas = [area for s, t in zip(found, known, strict=True) if (area := auc(s, t)) is not None]
    ne = None if (truth == truth[0]).all() else 100 * normalised_entropy(every, truth)
    return RankMetrics(ne, 100 * float(right), 100 * float(np.mean(areas)) if areas else None)


def normalised_entropy(scores: np.ndarray, labels: np.ndarray) -> float:
    """Cross entropy over that of the labels' mean as the only score."""
    mean = np.full_like(scores, labels.mean())
    return _cross_entropy(scores, labels) / _cross_entropy(mean, labels)


def _cross_entropy(scores: np.ndarray, labels: np.ndarray) -> float:
    p = np.clip(scores, _ETA, 1 - _ETA)
    return float(-(labels * np.log2(p) + (1 - labels) * np.log2(1 - p)).mean())


def auc(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """Share of pairs in order, ties half; None where labels or scores are all the same."""
    positive = int(labels.sum())
    negative = len(labels) - positive
    if not positive or not negative or (scores == scores[0]).all():
        return None
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    below = ranks[labels == 1].sum() - positive * (positive + 1) / 2
    return float(below / (positive * negative))

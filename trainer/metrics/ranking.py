"""The area under the ROC curve from scores of any range: exact for so many scores, and with a known error beyond.

A ranking is a table (R, 4) float64 of the columns lowest score, greatest score, positives, negatives. A row is one
score with all samples that have it, so the area is exact and ties count as half. A ranking with more rows than its
limit joins neighbours, so that all rows hold about equally many samples. A joined row is an interval of scores: the
order of samples whose rows overlap is unknown, they count as half, and half of their pairs is the most that the area
can be wrong by. Rankings of several workers, or of one epoch's parts, are merged in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

COLUMNS = 4
Area = tuple[float, float]
"""The area under the curve, and the most that it can be wrong by: 0 if it is exact."""


def ranked(scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Return the ranking (R, 4) of samples.

    Args:
        scores: (N,) float64, of any range; what is not a number ranks lowest.
        positive: (N,) bool, which samples have the label 1.
    """
    scores = np.nan_to_num(scores, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    distinct, place = np.unique(scores, return_inverse=True)
    positives, negatives = (
        np.bincount(place, weights=chosen, minlength=len(distinct)) for chosen in (positive, ~positive)
    )
    return np.stack([distinct, distinct, positives, negatives], axis=1)


def merged(rankings: Sequence[np.ndarray], limit: int) -> np.ndarray:
    """Return one ranking of the samples of all, with at most ``limit`` rows (at least 16)."""
    rows = np.concatenate(rankings)
    exact = bool((rows[:, 0] == rows[:, 1]).all())
    rows = rows[np.argsort(rows[:, 0], kind="stable") if exact else np.lexsort((rows[:, 1], rows[:, 0]))]
    # compared and not subtracted: the difference of equal infinities is NaN
    rows = _joined(rows, (rows[1:, :2] != rows[:-1, :2]).any(1))
    return rows if len(rows) <= limit else _of_equal_weight(rows, limit // 4)


def _of_equal_weight(rows: np.ndarray, groups: int) -> np.ndarray:
    """Join neighbours into about ``groups`` rows of equally many samples, three times as many at the most.

    Scores inside an interval are added to it first, so that intervals do not grow into each other. A score that has
    enough samples for a group stays alone, so that frequent ties stay exact.
    """
    limit, total = 4 * groups, rows[:, 2:].sum()
    rows = _absorbed(rows, rows[:, 2:].sum(1) * groups >= total)
    if len(rows) <= limit:
        return rows
    weights = rows[:, 2] + rows[:, 3]
    group = np.floor((weights.cumsum() - weights) * (groups / total))
    heavy = weights * groups >= total
    return _joined(rows, (np.diff(group) != 0) | heavy[1:] | heavy[:-1])


def _absorbed(rows: np.ndarray, heavy: np.ndarray) -> np.ndarray:
    """Add each single score that is not ``heavy`` (R,) to the interval around it, if there is one."""
    single = rows[:, 0] == rows[:, 1]
    intervals = rows[~single]
    place = np.searchsorted(intervals[:, 0], rows[:, 0], "right") - 1
    inside = single & ~heavy & (place >= 0)
    inside[inside] = rows[inside, 0] <= intervals[place[inside], 1]
    for column in (2, 3):
        intervals[:, column] += np.bincount(place[inside], rows[inside, column], len(intervals))
    rows = rows.copy()
    rows[~single] = intervals
    left: np.ndarray = rows[~inside]
    return left


def _joined(rows: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Join sorted rows (R, 4) into one from each place where one begins; ``begins`` (R - 1,) is of all but the
    first."""
    if not len(rows):
        return rows
    starts = np.concatenate([[0], np.flatnonzero(begins) + 1])
    low, high, positives, negatives = rows.T
    return np.stack(
        [
            low[starts],
            np.maximum.reduceat(high, starts),
            np.add.reduceat(positives, starts),
            np.add.reduceat(negatives, starts),
        ],
        axis=1,
    )


def area(ranking: np.ndarray) -> Area | None:
    """Return the area under the ROC curve and its greatest error; None if a class has no sample.

    The area is the share of pairs (a positive, a negative) in which the positive's score is greater, ties counted as
    half (Mann & Whitney, 1947).
    """
    low, high, positives, negatives = ranking.T
    pairs = positives.sum() * negatives.sum()
    if not pairs:
        return None
    by_high = np.argsort(high, kind="stable")
    up_to_high = np.concatenate([[0.0], negatives[by_high].cumsum()])
    up_to_low = np.concatenate([[0.0], negatives.cumsum()])
    won = (positives * up_to_high[np.searchsorted(high[by_high], low, "left")]).sum()
    possible = (positives * up_to_low[np.searchsorted(low, high, "right")]).sum()
    single = low == high
    unknown = 0.0 if single.all() else (possible - won) - (positives * negatives)[single].sum()
    return float((won + possible) / 2 / pairs), float(max(0.0, unknown) / 2 / pairs)

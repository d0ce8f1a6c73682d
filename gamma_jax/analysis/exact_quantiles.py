"""Quantiles of more values than fit in memory, without approximation."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_LOW = 16  # bits that the second look resolves


def quantile_edges(values: Iterable[np.ndarray], bins: int) -> np.ndarray:
  """Exact quantiles of any number of values in fixed memory.

  The bits of floats from 0 up are ordered as the floats are, so counting their
  upper half, then the lower half where a quantile falls, finds the value.

  Args:
    values: blocks of float32 [n], none below 0; gone through twice.
    bins: how many of equal size.

  Returns:
    Increasing float32 [at most bins - 1]; bin i holds the values from edge
    i - 1 up to but without edge i. Equal edges are one.
  """
  coarse = np.zeros(1 << _LOW, np.int64)
  for block in values:
    np.add.at(coarse, _bits(block) >> _LOW, 1)
  total = int(coarse.sum())
  ranks = np.array([i * total // bins for i in range(1, bins)], np.int64)
  ends = np.cumsum(coarse)
  upper = np.searchsorted(ends, ranks, 'right')
  wanted = np.unique(upper)
  fine = np.zeros((len(wanted), 1 << _LOW), np.int64)
  if not len(wanted):
    return np.zeros(0, np.float32)
  for block in values:
    bits = _bits(block)
    row = np.searchsorted(wanted, bits >> _LOW)
    row = np.minimum(row, len(wanted) - 1)
    here = wanted[row] == bits >> _LOW
    np.add.at(fine, (row[here], bits[here] & ((1 << _LOW) - 1)), 1)
  edges = []
  for rank, up in zip(ranks, upper, strict=True):
    counts = np.cumsum(fine[np.searchsorted(wanted, up)])
    inside = rank - (ends[up] - coarse[up])
    edges.append((up << _LOW) + np.searchsorted(counts, inside, 'right'))
  return np.unique(np.array(edges, np.uint32)).view(np.float32)


def _bits(values: np.ndarray) -> np.ndarray:
  # + 0 turns -0, whose bits are the largest of all, into 0.
  return (values + np.float32(0)).view(np.uint32).astype(np.int64)

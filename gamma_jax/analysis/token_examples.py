"""The tokens where two models differ most, in their context.

Signs as in token_gap: above 0, a is better.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from gamma_jax.analysis.token_gap import Block, gain


class Example(NamedTuple):
  """A token in its context; the arrays run over the context.

  Attributes:
    doc: number of the document.
    position: index of the token in its document.
    at: index of the token in the arrays below.
    token: int [n].
    nll_a: [n], nats.
    nll_b: [n], nats.
  """

  doc: int
  position: int
  at: int
  token: np.ndarray
  nll_a: np.ndarray
  nll_b: np.ndarray


def extremes(
  blocks: Iterable[Block], *, count: int, before: int, after: int, window: int
) -> tuple[list[Example], list[Example]]:
  """The tokens where a gains most and where it loses most, most first.

  By gain, which orders tokens as delta_sym does. At most one token of a
  document, so that one odd text does not fill the list.

  Args:
    blocks: all rows, once.
    count: how many of each at most.
    before: tokens of context before.
    after: tokens of context after.
    window: tokens that a model sees together; context ends with them.
  """
  found: tuple[dict, dict] = ({}, {})  # doc -> (gain, example)
  for block in blocks:
    gains = gain(block.nll_a, block.nll_b)
    for best, sign in zip(found, (1, -1), strict=True):
      _take(best, sign * gains, block, count, (before, after, window))
  gaining, losing = (
    [best[doc][1] for doc in _largest(best, count)] for best in found
  )
  return gaining, losing


def _largest(best: dict, count: int) -> list[int]:
  return heapq.nsmallest(count, best, key=lambda doc: (-best[doc][0], doc))


def _take(best: dict, gains, block: Block, count: int, context) -> None:
  """Keeps the `count` documents with the largest gains seen so far."""
  least = 0.0
  if len(best) >= count:
    least = min(value for value, _ in best.values())
  at = np.flatnonzero((gains > 0) & (gains >= least))
  # The largest of each document; of equal ones the first in the text.
  at = at[np.lexsort((block.position[at], -gains[at], block.doc[at]))]
  first = np.diff(block.doc[at], prepend=-1) != 0
  for i in at[first]:
    doc, value = int(block.doc[i]), float(gains[i])
    old_value, old = best.get(doc, (0.0, None))
    key = (-value, int(block.position[i]))
    if old is None or key < (-old_value, old.position):
      best[doc] = value, _example(block, i, *context)
  keep = set(_largest(best, count))
  for doc in [doc for doc in best if doc not in keep]:
    del best[doc]


def _example(block: Block, i: int, before: int, after: int, window: int):
  start, stop = max(i - before, 0), i + after + 1
  where = np.arange(start, min(stop, len(block.doc)))
  near = (
    (block.doc[where] == block.doc[i])
    & (block.position[where] - block.position[i] == where - i)
    & (block.position[where] // window == block.position[i] // window)
  )
  where = where[near]
  return Example(
    doc=int(block.doc[i]),
    position=int(block.position[i]),
    at=int(np.searchsorted(where, i)),
    token=block.token[where].copy(),
    nll_a=block.nll_a[where].copy(),
    nll_b=block.nll_b[where].copy(),
  )

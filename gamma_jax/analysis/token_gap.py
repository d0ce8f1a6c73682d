"""Where two models differ: probability gaps by token difficulty and frequency.

a and b are two models scored on the same tokens. One sign everywhere: a number
above 0 says that a is better.

  gain       nll_b - nll_a, in nats.
  delta_sym  (p_a - p_b) / (p_a + p_b) of the true next token, in [-1, 1].
  difficulty (nll_a + nll_b) / 2. Both models count alike: tokens picked as hard
             by one of them would make the other look good on them.

arXiv 2606.17945 names a difficulty (average loss) and a symmetric probability
gap but prints no formula that we could read; these are ours.

Intervals resample whole documents, as tokens within one are not independent.
Poisson(1) weights of documents stand in for drawing with replacement: a weight
depends on the number of the document alone, so one pass over blocks of rows
adds up all resamples, wherever a document is cut. Memory does not grow with
the tokens; it does by one byte for each document and bin.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gamma_jax.analysis import exact_quantiles

TAILS = (0.025, 0.975)
CHUNK = 256  # documents whose weights are drawn together


class Block(NamedTuple):
  """n scored tokens, the tokens of one window of text next to one another."""

  doc: np.ndarray  # int [n], from 0
  position: np.ndarray  # int [n], index of the token in its document
  token: np.ndarray  # int [n], id of the token that was to be predicted
  nll_a: np.ndarray  # float [n], nats
  nll_b: np.ndarray  # float [n], nats


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A mean over tokens with its 95 % bootstrap interval by document.

  `low` and `high` are nan with fewer than two documents.
  """

  mean: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class Bin:
  """Tokens of one bin.

  Attributes:
    low: smallest difficulty (nats) or share of all tokens in the bin.
    high: where the next bin begins; of the last bin, its end.
    tokens: how many.
    documents: how many have such a token.
    nll_a: mean, nats.
    nll_b: mean, nats.
    gain: nats per token; above 0: a is better.
    delta_sym: above 0: a is better.
    contribution: sum of the gains here / all tokens; adds up to the overall
      gain.
  """

  low: float
  high: float
  tokens: int
  documents: int
  nll_a: float
  nll_b: float
  gain: Estimate
  delta_sym: Estimate
  contribution: float


@dataclasses.dataclass(frozen=True)
class TokenGap:
  """Result of `analyse`; bins without a token are left out.

  Attributes:
    overall: all tokens as one bin, of difficulty.
    difficulty: bins of about equally many tokens, easy ones first. Tokens of
      equal difficulty are never parted.
    frequency: bins by the share of a token id among all tokens here, half a
      decade each, rare ones first.
    token_counts: int64 [V].
    token_gain: float64 [V], sum of the gains of each id, nats.
  """

  overall: Bin
  difficulty: Sequence[Bin]
  frequency: Sequence[Bin]
  token_counts: np.ndarray
  token_gain: np.ndarray


def gain(nll_a: np.ndarray, nll_b: np.ndarray) -> np.ndarray:
  """nll_b - nll_a in float64; above 0: a is better."""
  return np.subtract(nll_b, nll_a, dtype=np.float64)


def delta_sym(nll_a: np.ndarray, nll_b: np.ndarray) -> np.ndarray:
  """(p_a - p_b) / (p_a + p_b) in float64; above 0: a is better."""
  # Equal to the ratio, and exact where both probabilities underflow.
  return np.tanh(gain(nll_a, nll_b) / 2)


def difficulty(nll_a: np.ndarray, nll_b: np.ndarray) -> np.ndarray:
  """Mean NLL of both, float32, nats.

  Raises:
    ValueError: one of them is not finite.
  """
  mean = np.add(nll_a, nll_b, dtype=np.float64) / 2
  if not np.isfinite(mean).all():
    raise ValueError('a token has an NLL that is not finite')
  # Rounding can bring the NLL of a sure token to just below 0.
  return np.maximum(mean, 0).astype(np.float32)


def frequency_bins(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Bins of half a decade of the share of a token id among all tokens.

  Args:
    counts: int [V].

  Returns:
    (int [V] bin of each id, rare ones first; [bins + 1] edges, shares).
  """
  share = np.maximum(counts, 1) / max(counts.sum(), 1)
  half_decade = np.floor(2 * np.log10(share)).astype(np.int64)
  first = int(half_decade[counts > 0].min(initial=0))
  last = int(half_decade[counts > 0].max(initial=first))
  return (
    np.clip(half_decade, first, last) - first,
    10.0 ** (np.arange(first, last + 2) / 2),
  )


class _Sums:
  """Sums by document-weighted bin: the truth, and its resamples."""

  def __init__(self, bins: int, documents: int, replicates: int, seed: int):
    self.totals = np.zeros((4, bins))  # tokens, nll_a, nll_b, delta_sym
    self.resampled = np.zeros((3, replicates, bins))  # tokens, gain, delta_sym
    self.seen = np.zeros((documents, bins), bool)
    # Neighbouring documents share a draw, and blocks neighbouring documents.
    self._weights = functools.lru_cache(maxsize=8)(
      lambda chunk: np.random.default_rng([seed, chunk]).poisson(
        1.0, (CHUNK, replicates)
      )
    )

  def add(self, block: Block, bins: Sequence[np.ndarray]) -> None:
    """Adds rows, each to one bin of every partition in `bins`."""
    docs, row = np.unique(block.doc, return_inverse=True)
    n = self.totals.shape[1]
    values = (
      None,
      block.nll_a.astype(np.float64),
      block.nll_b.astype(np.float64),
      delta_sym(block.nll_a, block.nll_b),
    )
    sums = np.zeros((len(values), len(docs), n))
    for bin_of_token in bins:
      at = row * n + bin_of_token
      for out, value in zip(sums, values, strict=True):
        out += np.bincount(at, value, out.size).reshape(out.shape)
    self.totals += sums.sum(axis=1)
    self.seen[docs] |= sums[0] > 0
    parts = np.stack([sums[0], sums[2] - sums[1], sums[3]])
    cuts = np.flatnonzero(np.diff(docs // CHUNK)) + 1
    for some in np.split(np.arange(len(docs)), cuts):
      if len(some):
        weights = self._weights(int(docs[some[0]] // CHUNK))
        weights = weights[docs[some] % CHUNK].T.astype(np.float64)
        self.resampled += weights @ parts[:, some]

  def bin(self, at: slice | int, low: float, high: float, all_tokens: float):
    """The Bin over the columns `at`."""
    columns = np.atleast_1d(np.arange(self.totals.shape[1])[at])
    tokens, nll_a, nll_b, delta = self.totals[:, columns].sum(axis=1)
    documents = int(self.seen[:, columns].any(axis=1).sum())
    counts, gains, deltas = self.resampled[:, :, columns].sum(axis=2)
    return Bin(
      low=float(low),
      high=float(high),
      tokens=int(tokens),
      documents=documents,
      nll_a=float(nll_a / tokens),
      nll_b=float(nll_b / tokens),
      gain=_estimate((nll_b - nll_a) / tokens, gains, counts, documents),
      delta_sym=_estimate(delta / tokens, deltas, counts, documents),
      contribution=float((nll_b - nll_a) / all_tokens),
    )


def analyse(
  blocks: Iterable[Block],
  *,
  documents: int,
  vocab_size: int,
  bins: int = 20,
  replicates: int = 1000,
  seed: int = 0,
) -> TokenGap:
  """Gaps by difficulty and by frequency, with intervals by document.

  Args:
    blocks: all rows; gone through several times, a block in memory at a time.
    documents: how many `doc` counts.
    vocab_size: V.
    bins: quantile bins of difficulty.
    replicates: resamples of the documents behind an interval.
    seed: of the resamples.

  Raises:
    ValueError: no token, or an NLL that is not finite.
  """
  counts = np.zeros(vocab_size, np.int64)
  gains = np.zeros(vocab_size)
  least, most = np.inf, -np.inf
  for block in blocks:
    counts += np.bincount(block.token, minlength=vocab_size)
    value = gain(block.nll_a, block.nll_b)
    gains += np.bincount(block.token, value, vocab_size)
    hard = difficulty(block.nll_a, block.nll_b)
    least = min(least, hard.min(initial=np.inf))
    most = max(most, hard.max(initial=-np.inf))
  if not counts.any():
    raise ValueError('there is no token to compare')
  edges = exact_quantiles.quantile_edges(_Difficulties(blocks), bins)
  frequency_of, shares = frequency_bins(counts)
  n = len(edges) + 1
  sums = _Sums(n + len(shares) - 1, documents, replicates, seed)
  for block in blocks:
    hard = difficulty(block.nll_a, block.nll_b)
    by_difficulty = np.searchsorted(edges, hard, 'right')
    sums.add(block, [by_difficulty, n + frequency_of[block.token]])
  limits = [least, *edges, most]

  def some(first: int, edges: Sequence[float]) -> list[Bin]:
    return [
      sums.bin(first + i, low, high, counts.sum())
      for i, (low, high) in enumerate(zip(edges, edges[1:], strict=False))
      if sums.totals[0, first + i]
    ]

  return TokenGap(
    overall=sums.bin(slice(0, n), least, most, counts.sum()),
    difficulty=some(0, limits),
    frequency=some(n, shares),
    token_counts=counts,
    token_gain=gains,
  )


class _Difficulties:
  """Difficulties of blocks, as often as wanted."""

  def __init__(self, blocks: Iterable[Block]):
    self._blocks = blocks

  def __iter__(self) -> Iterator[np.ndarray]:
    return (difficulty(b.nll_a, b.nll_b) for b in self._blocks)


def _estimate(mean, sums, counts, documents: int) -> Estimate:
  if documents < 2:
    return Estimate(float(mean), np.nan, np.nan)
  drawn = counts > 0  # a resample may miss all documents of a rare bin
  if not drawn.any():
    return Estimate(float(mean), np.nan, np.nan)
  low, high = np.quantile(sums[drawn] / counts[drawn], TAILS)
  return Estimate(float(mean), float(low), float(high))

"""In which order documents are read: a permutation an epoch, and mixtures.

The order is the one that grain gives for `source.seed(seed).shuffle().repeat()`
and for `MapDataset.mix` of such streams, computed here for many positions at
once: a call a document would take longer than reading the document.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

_WORD = 0xFFFFFFFF
_SMALL = 4096


def shuffle_seed(seed: int) -> int:
  """What grain makes of `seed` for the first shuffle after it."""
  state = np.random.SeedSequence([seed, 1]).generate_state(1, np.uint32)
  return int(state[0])


def permute(index: np.ndarray, size: int, seed: int) -> np.ndarray:
  """Places of `index` (int64, each below `size`) in a permutation of `size`.

  A Feistel cipher with the round function of Simon (eprint.iacr.org/2013/404)
  on an even number of bits, repeated until the result is below `size`.
  """
  if size < _SMALL:
    return _small(size, seed)[index]
  result = _encrypt(index, size, seed)
  todo = np.arange(len(index))
  while len(todo := todo[result[todo] >= size]):
    result[todo] = _encrypt(result[todo], size, seed)
  return result


@functools.lru_cache(maxsize=16)
def _small(size: int, seed: int) -> np.ndarray:
  """The whole permutation: a small one takes many repeats, cheap in a list."""
  table = _encrypt(np.arange(1 << 16), size, seed).tolist()
  places = []
  for place in table[:size]:
    while place >= size:
      place = table[place]
    places.append(place)
  return np.array(places)


def _encrypt(index: np.ndarray, size: int, seed: int) -> np.ndarray:
  bits = max(math.ceil(math.log2(max(size - 1, 1))), 16)
  half = (bits + 1) // 2
  mask = (1 << half) - 1
  left, right = index >> half & mask, index & mask
  keys = [key & mask for key in _round_keys(seed)]
  for first, second in (keys[:2], keys[2:]):
    left = left ^ _round(right, half) ^ first
    right = right ^ _round(left, half) ^ second
  return left << half | right


def _round(x: np.ndarray, half: int) -> np.ndarray:
  def turn(by: int) -> np.ndarray:
    return (x << by | x >> (half - by)) & ((1 << half) - 1)

  return (turn(1) & turn(8)) ^ turn(2)


def _round_keys(seed: int) -> list[int]:
  """Four words from one, as C++ defines `std::seed_seq{seed}.generate`."""
  words = [0x8B8B8B8B] * 4

  def mix(x: int) -> int:
    return x ^ (x >> 27)

  for k in range(4):
    first = 1664525 * mix(words[k] ^ words[(k + 1) % 4] ^ words[k - 1]) & _WORD
    second = first + (1, 1 + seed, 2, 3)[k] & _WORD
    words[(k + 1) % 4] = words[(k + 1) % 4] + first & _WORD
    words[(k + 2) % 4] = words[(k + 2) % 4] + second & _WORD
    words[k] = second
  for k in range(4):
    total = words[k] + words[(k + 1) % 4] + words[k - 1] & _WORD
    first = 1566083941 * mix(total) & _WORD
    second = first - k & _WORD
    words[(k + 1) % 4] ^= first
    words[(k + 2) % 4] ^= second
    words[k] = second
  return words


@dataclasses.dataclass(frozen=True)
class Order:
  """An endless stream of documents.

  Attributes:
    seed: of `data.seed`, in [0, 2^32).
    ranges: (first, number) of the documents of each part in the dataset.
    weights: documents of each part, relative; parts take turns accordingly.
  """

  seed: int
  ranges: tuple[tuple[int, int], ...]
  weights: tuple[float, ...] = (1.0,)

  def documents(self, positions: np.ndarray) -> np.ndarray:
    """Indices in the dataset at `positions` of the stream, int64 [n]."""
    found = np.empty_like(positions)
    left, width = np.arange(len(positions)), positions
    shares = [int(w * (100 / min(self.weights))) for w in self.weights]
    total = sum(shares)
    next_ = positions + 1  # how many the first parts get of `width` + 1
    for (first, number), share in zip(self.ranges, shares, strict=True):
      # What the later parts get of the positions before this one, and of it.
      rest, rest_next = (
        x * (total - share) // total if total > share else np.zeros_like(x)
        for x in (width, next_)
      )
      mine = (width - rest) != (next_ - rest_next)
      count = (next_ - rest_next)[mine] - 1
      found[left[mine]] = first + self._shuffled(count, number)
      left, width, next_ = left[~mine], rest[~mine], rest_next[~mine]
      total -= share
    return found

  def _shuffled(self, index: np.ndarray, number: int) -> np.ndarray:
    epochs, index = np.divmod(index, number)
    found = np.empty_like(index)
    start = shuffle_seed(self.seed)
    for epoch in np.unique(epochs):
      here = epochs == epoch
      seed = (start + int(epoch)) % 2**32
      found[here] = permute(index[here], number, seed)
    return found

"""The composite-anchor task: is an unseen pair composed, or remembered?

Zhang et al. 2024 (arXiv 2405.05409). A row is 9 numbers and an answer: among
random items a key item x, then directly two anchors a, b. An anchor adds to
its item, and the answer is composed, x + shift(a) + shift(b), but for one pair
whose answer is forced to another shift. The mirror of that pair is never
trained on: a model that composes gives it x - 10, one that learned the forced
pair as a fact about two tokens, in whatever order, gives x - 6.

A key x is trained on at position p where x mod 7 != p; the seventh left is for
evaluation. Numbers are their own token ids. NumPy only; letters: B batch,
V vocabulary, T = SEQ_LEN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SOURCE = 'anchor'  # data.source
SEQ_LEN = 9
POSITIONS = SEQ_LEN - 2  # of the key: two anchors follow it
FIRST_ITEM, LAST_ITEM = 20, 99
SHIFTS = np.array([5, 1, -2, -8])  # of anchors 1 to 4
FORCED, MIRROR = (3, 4), (4, 3)
FORCED_SHIFT = -6
PAIRS = np.array([(a, b) for a in range(1, 5) for b in range(1, 5)])
TRAINED = PAIRS[(PAIRS != MIRROR).any(axis=1)]
# Of answers: 20 - 8 - 8 (an id that anchor 4 has, too) to 99 + 5 + 5.
VOCABULARY = LAST_ITEM + 2 * int(SHIFTS.max()) + 1
FILLERS = 4  # evaluation rows of each item and pair


class Rows(NamedTuple):
  """Rows with what they were made from.

  Attributes:
    tokens: int32 [B, T + 1], the answer last.
    key: int [B], the key item.
    position: int [B], where it stands.
    pair: int [B, 2], the anchors behind it.
  """

  tokens: np.ndarray
  key: np.ndarray
  position: np.ndarray
  pair: np.ndarray


def composed(key: np.ndarray, pair: np.ndarray) -> np.ndarray:
  """g(g(x; a); b) of keys [B] and pairs [B, 2]."""
  return key + SHIFTS[pair - 1].sum(axis=-1)


def answer(key: np.ndarray, pair: np.ndarray) -> np.ndarray:
  """What training rows end in: composed, or x - 6 for the forced pair."""
  forced = (pair == FORCED).all(axis=-1)
  return np.where(forced, key + FORCED_SHIFT, composed(key, pair))


def training_rows(seed: int, step: int, batch_size: int) -> Rows:
  """The rows of an update; the same for the same seed and step, anywhere.

  Pairs are uniform over the 15 that are trained on, keys over all items,
  positions over the six that a key is trained at.
  """
  rng = np.random.default_rng([seed, step])
  key = rng.integers(FIRST_ITEM, LAST_ITEM + 1, batch_size)
  position = rng.integers(POSITIONS - 1, size=batch_size)
  position += position >= key % POSITIONS  # steps over the held-out one
  pair = TRAINED[rng.integers(len(TRAINED), size=batch_size)]
  return _rows(_items(rng, batch_size), key, position, pair)


def heldout_rows(limit: int = 0) -> Rows:
  """Every key at its held-out position, before every pair.

  All pairs stand in the same rows of random items, so that they differ in
  nothing else; the mirror's own "answer" is the composed one.

  Args:
    limit: the first so many rows, in which pairs take turns; 0: all, which is
      FILLERS * 80 rows of each of the 16 pairs.
  """
  rng = np.random.default_rng([0, 0, 1])  # no [seed, step] is as long
  keys = np.arange(FIRST_ITEM, LAST_ITEM + 1)
  keys = np.concatenate([rng.permutation(keys) for _ in range(FILLERS)])
  items = np.repeat(_items(rng, len(keys)), len(PAIRS), axis=0)
  key = np.repeat(keys, len(PAIRS))
  pair = np.tile(PAIRS, (len(keys), 1))
  rows = _rows(items, key, key % POSITIONS, pair)
  return Rows(*(field[: limit or None] for field in rows))


class TrainIterator:
  """Endless training batches; its state is the number of those given.

  A batch is {'tokens', 'segment_ids', 'positions'}, int32 [B, T + 1], and
  'loss_mask', bool [B, T + 1]: the token is asked for, which is the answer
  alone.
  """

  def __init__(self, *, seed: int, batch_size: int):
    self._seed, self._batch_size, self._step = seed, batch_size, 0

  def __iter__(self):
    return self

  def __next__(self) -> dict[str, np.ndarray]:
    rows = training_rows(self._seed, self._step, self._batch_size)
    self._step += 1
    mask = np.zeros(rows.tokens.shape, bool)
    mask[:, -1] = True
    return {'tokens': rows.tokens, **_whole(rows.tokens), 'loss_mask': mask}

  def get_state(self) -> dict[str, int]:
    """Position, as JSON holds it."""
    return {'step': self._step}

  def set_state(self, state: dict[str, int]) -> None:
    """Moves to a position."""
    self._step = state['step']


def questions(rows: Rows) -> dict[str, np.ndarray]:
  """{'inputs', 'segment_ids', 'positions'}, int32 [B, T], without answers."""
  inputs = rows.tokens[:, :-1]
  return {'inputs': inputs, **_whole(inputs)}


def _items(rng: np.random.Generator, count: int) -> np.ndarray:
  return rng.integers(FIRST_ITEM, LAST_ITEM + 1, (count, SEQ_LEN))


def _rows(items, key, position, pair) -> Rows:
  """Puts keys and pairs in rows of items, and answers behind them."""
  tokens = np.column_stack([items, answer(key, pair)]).astype(np.int32)
  row = np.arange(len(tokens))
  for offset, token in enumerate((key, *pair.T)):
    tokens[row, position + offset] = token
  return Rows(tokens, key, position, pair)


def _whole(tokens: np.ndarray) -> dict[str, np.ndarray]:
  """Every row is one document."""
  positions = np.arange(tokens.shape[1], dtype=np.int32)
  return {
    'segment_ids': np.ones_like(tokens),
    'positions': np.broadcast_to(positions, tokens.shape),
  }

"""Multiple choice by the likelihood of each choice after its prompt.

A sequence is [eot] prompt choice; only tokens of the choice count. Prompt and
choice are encoded apart, so the choice is the same tokens in every place.
Where both are too long the start of the prompt goes, never the choice. Many
sequences share a row, as documents do in training, and do not see one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gamma_jax.data import tokenizer as tokenizer_lib
from gamma_jax.tasks import rates
from gamma_jax.tasks.items import Choice

Batch = dict[str, np.ndarray]


class Scored(NamedTuple):
  """One prompt with one choice."""

  ids: np.ndarray  # int32 [n + 1], eot first
  scored: int  # how many of the last are the choice
  cut: bool  # the prompt lost its start


class Score(NamedTuple):
  """What a model says of one item."""

  logprob: np.ndarray  # [choices], nats
  bytes: np.ndarray  # [choices], of the text without the space around it
  cut: bool  # a prompt lost its start

  @property
  def likeliest(self) -> int:
    """The choice of greatest probability."""
    return int(np.argmax(self.logprob))

  @property
  def likeliest_per_byte(self) -> int:
    """The choice of greatest log-probability per byte."""
    return int(np.argmax(self.logprob / self.bytes))


def score(
  items: Sequence[Choice],
  tokenizer: tokenizer_lib.Tokenizer,
  nll_fn: Callable[[Batch], np.ndarray],
  *,
  seq_len: int,
  batch_size: int,
) -> list[Score]:
  """Scores every choice of every item.

  Args:
    items: the questions.
    tokenizer: of the model.
    nll_fn: batch of [B, T] arrays -> NLL [B, T] (train_step.eval_step).
    seq_len: T; longer only where a choice alone is.
    batch_size: B; changes no score.
  """
  split = [
    [_split(item.prompt, choice, tokenizer) for choice in item.choices]
    for item in items
  ]
  longest = max(len(choice) for item in split for _, choice in item)
  room = max(seq_len, longest)
  sequences = [
    _sequence(*parts, tokenizer.eot_id, room)
    for item in split
    for parts in item
  ]
  logprob = np.zeros(len(sequences))
  for batch in _batches(sequences, room, batch_size):
    nll = nll_fn({k: v for k, v in batch.items() if k != 'sequence'})
    scored = batch['mask']
    # float64, as in evaluate.DocumentSums.
    np.subtract.at(
      logprob, batch['sequence'][scored], nll[scored].astype(np.float64)
    )
  found, start = [], 0
  for item in items:
    end = start + len(item.choices)
    size = np.array([len(c.strip().encode()) for c in item.choices])
    cut = any(s.cut for s in sequences[start:end])
    found.append(Score(logprob[start:end], size, cut))
    start = end
  return found


def summarize(items: Sequence[Choice], scores: Sequence[Score]) -> dict:
  """acc, acc_norm (log-probability per byte) with 95 % intervals, and counts.

  chance is what a uniform guess would get.
  """
  pairs = list(zip(items, scores, strict=True))
  return {
    'items': len(items),
    **rates.rate('acc', [i.answer == s.likeliest for i, s in pairs]),
    **rates.rate(
      'acc_norm', [i.answer == s.likeliest_per_byte for i, s in pairs]
    ),
    'chance': float(np.mean([1 / len(item.choices) for item in items])),
    'prompts_cut': sum(s.cut for s in scores),
  }


def _split(
  prompt: str, choice: str, tokenizer
) -> tuple[np.ndarray, np.ndarray]:
  # A space that ends a prompt is no token of its own in text: it belongs to
  # the word that follows.
  kept = prompt.rstrip(' ')
  return tokenizer.encode(kept), tokenizer.encode(prompt[len(kept) :] + choice)


def _sequence(prompt, choice, eot: int, room: int) -> Scored:
  keep = min(len(prompt), room - len(choice))
  tail = prompt[len(prompt) - keep :]
  ids = np.concatenate([[eot], tail, choice]).astype(np.int32)
  return Scored(ids, len(choice), keep < len(prompt))


def _batches(
  sequences: Sequence[Scored], T: int, batch_size: int
) -> Iterator[Batch]:
  """Rows of sequences, the longest first: what shares a row depends on the
  sequences alone, not on their order or on the batch size."""
  order = sorted(
    range(len(sequences)),
    key=lambda i: (-len(sequences[i].ids), sequences[i].ids.tobytes()),
  )
  rows: list[list[int]] = []
  left = 0
  for i in order:
    size = len(sequences[i].ids) - 1
    if size > left:
      rows.append([])
      left = T
    rows[-1].append(i)
    left -= size
  for start in range(0, len(rows), batch_size):
    yield _batch(sequences, rows[start : start + batch_size], T, batch_size)


def _batch(sequences, rows: list[list[int]], T: int, B: int) -> Batch:
  names = ('inputs', 'labels', 'segment_ids', 'positions', 'sequence')
  batch = {name: np.zeros((B, T), np.int32) for name in names}
  batch['mask'] = np.zeros((B, T), bool)
  for b, row in enumerate(rows):
    start = 0
    for segment, i in enumerate(row, 1):
      ids, scored, _ = sequences[i]
      end = start + len(ids) - 1
      batch['inputs'][b, start:end] = ids[:-1]
      batch['labels'][b, start:end] = ids[1:]
      batch['segment_ids'][b, start:end] = segment
      batch['positions'][b, start:end] = np.arange(end - start)
      batch['sequence'][b, start:end] = i
      batch['mask'][b, end - scored : end] = True
      start = end
  return batch

"""Rows of packed documents, cut from one stream of tokens by array operations.

The documents of an order, framed, are laid end to end and cut every T+1 tokens.
Nothing is done for one token, and next to nothing for one document.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grain
import numpy as np

from gamma_jax import errors
from gamma_jax.data import builder as builder_lib
from gamma_jax.data import order as order_lib
from gamma_jax.data import prepare as prepare_lib

# Read at once: enough to make a document cheap, little enough to start at once.
DOCUMENTS, TOKENS = 2048, 2**20


class PackedDataset(grain.IterDataset):
  """Endless batches of {'tokens', 'segment_ids', 'positions'}, int32 [B, W].

  W is the width of a row, T+1. Grain gives worker i of n every n-th document.
  """

  def __init__(
    self, folder: Path, order: order_lib.Order, rows: int, width: int
  ):
    super().__init__()
    self.folder, self.order = folder, order
    self.rows, self.width = rows, width
    self.first, self.step = 0, 1

  def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
    del sequential_slice  # of an endless stream there is only one kind
    self.first, self.step = sl.start or 0, sl.step or 1

  def __iter__(self) -> PackedIterator:
    return PackedIterator(self)


class PackedIterator(grain.DatasetIterator):
  """See PackedDataset. The state is a document and how far into it we are."""

  def __init__(self, dataset: PackedDataset):
    super().__init__()
    self._ds = dataset
    manifest = prepare_lib.read_manifest(dataset.folder)
    self._content = manifest['content'][:16]
    dtype = np.min_scalar_type(manifest['vocab_size'] - 1)
    flat = np.memmap(dataset.folder / builder_lib.TOKENS, dtype, 'r')
    self._flat = np.asarray(flat)  # slices of a plain array are cheaper
    self._ends = np.load(dataset.folder / builder_lib.ENDS, mmap_mode='r')
    self._documents = sum(number for _, number in dataset.order.ranges)
    self._start(0, 0)

  def _start(self, document: int, token: int) -> None:
    """The next token is `token` (may be past its end) of `document`."""
    self._first = document  # of the stream, that of the buffer begins with
    self._at = token  # in the buffer
    self._tokens = np.empty(0, self._flat.dtype)
    self._starts = np.zeros(1, np.int64)  # of documents, then the end
    self._of = np.empty(0, np.int32)  # which document of the buffer, by token

  def __next__(self) -> dict[str, np.ndarray]:
    rows, width = self._ds.rows, self._ds.width
    self._fill(rows * width)
    here = slice(self._at, self._at + rows * width)
    of = self._of[here].reshape(rows, width)
    places = np.arange(here.start, here.stop).reshape(rows, width)
    # A segment begins with its document or, when that was cut, with the row.
    begins = np.maximum(self._starts[of], places[:, :1])
    self._at = here.stop
    return {
      'positions': (places - begins).astype(np.int32),
      'segment_ids': of - of[:, :1] + np.int32(1),
      'tokens': self._tokens[here].reshape(rows, width).astype(np.int32),
    }

  def _fill(self, needed: int) -> None:
    """Makes the buffer hold `needed` tokens after `_at`."""
    if self._at + needed <= len(self._tokens):
      return
    self._drop()
    pieces, starts = [self._tokens], list(self._starts)
    while starts[-1] < self._at + needed:
      # Not over many epochs at once: each begins with a new permutation.
      count = min(DOCUMENTS, max(self._documents, 16))
      begin = self._first + len(starts) - 1
      positions = np.arange(begin, begin + count)
      positions = self._ds.first + positions * self._ds.step
      index = self._ds.order.documents(positions)
      begins, ends = self._ends[index], self._ends[index + 1]
      last = np.searchsorted(np.cumsum(ends - begins), TOKENS) + 1
      for one, other in zip(
        begins[:last].tolist(), ends[:last].tolist(), strict=True
      ):
        pieces.append(self._flat[one:other])
      starts += (starts[-1] + np.cumsum((ends - begins)[:last])).tolist()
    self._tokens = np.concatenate(pieces)
    self._starts = np.array(starts)
    self._of = np.repeat(
      np.arange(len(starts) - 1, dtype=np.int32), np.diff(self._starts)
    )

  def _drop(self) -> None:
    """Forgets the documents that are used up."""
    done = np.searchsorted(self._starts, self._at, side='right') - 1
    begin = self._starts[done]
    self._first += int(done)
    self._at -= int(begin)
    self._tokens = self._tokens[begin:]
    self._starts = self._starts[done:] - begin

  def get_state(self) -> dict[str, Any]:
    done = int(np.searchsorted(self._starts, self._at, side='right')) - 1
    return {
      'document': self._first + done,
      'token': self._at - int(self._starts[done]),
      'content': self._content,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Moves to `state`, also to one that grain's own packing had saved.

    Raises:
      ConfigError: the text is another one.
    """
    if state.get('content', self._content) != self._content:
      raise errors.ConfigError(
        f'data: {self._ds.folder} holds other text than the run began with'
      )
    if 'document' in state:
      self._start(state['document'], state['token'])
      return
    token = max(state['remainder_slices']['tokens'][0], 0)
    rows = state['elements_from_buffer_after_checkpoint']
    self._start(
      state['parent_state']['next_index'], token + rows * self._ds.width
    )

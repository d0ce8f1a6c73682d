"""The data streams of a run: one for each distinct data seed.

Members of a population with the same data seed read the same batches, once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import jax

from gamma_jax.config import Config
from gamma_jax.data import pipeline


def data_seed(config: Config) -> int:
  """Seed of the data order."""
  return config.seed if config.data.seed is None else config.data.seed


class Streams:
  """Iterators side by side, with one state; saved like a single iterator.

  Attributes:
    member: index of the stream of each config.
  """

  def __init__(self, configs: Sequence[Config]):
    seeds = list(dict.fromkeys(data_seed(c) for c in configs))
    self.member = [seeds.index(data_seed(c)) for c in configs]
    one = configs[0]
    self._iterators = [
      pipeline.train_iterator(
        one.data,
        seed=seed,
        batch_size=one.train.batch_size // jax.process_count(),
        seq_len=one.train.seq_len,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
      )
      for seed in seeds
    ]

  def __next__(self) -> list[dict]:
    """Next batch of every stream."""
    return [next(iterator) for iterator in self._iterators]

  def __iter__(self):
    return self

  def get_state(self) -> bytes:
    """Position of every stream (bytes: grain's protocol for foreign types)."""
    return json.dumps([i.get_state() for i in self._iterators]).encode()

  def set_state(self, state: bytes) -> None:
    """Moves every stream.

    Raises:
      ValueError: the state belongs to another number of streams.
    """
    states = json.loads(state.decode())
    for iterator, one in zip(self._iterators, states, strict=True):
      iterator.set_state(one)

  def start_prefetch(self) -> None:
    """Called by grain after a restore."""
    for iterator in self._iterators:
      iterator.start_prefetch()

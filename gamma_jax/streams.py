"""The data streams of a run: one for each distinct data seed.

Members of a population with the same data seed read the same batches, once.

With many processes each reads and packs the whole global batch and puts its
rows on its devices. Hence a position is one for all, and a run goes on with
the same batches on any number of processes. The price is that P processes
read P times, at several million tokens a second and core.
"""

from __future__ import annotations

from collections.abc import Sequence

from gamma_jax.config import Config
from gamma_jax.data import anchor, pipeline


def data_seed(config: Config) -> int:
  """Seed of the data order."""
  return config.seed if config.data.seed is None else config.data.seed


def inputs_per_label(config: Config) -> int:
  """Tokens read for each that is scored: a row of anchors asks for one."""
  return config.train.seq_len if config.data.source == anchor.SOURCE else 1


class Streams:
  """Iterators of global batches side by side, with one position.

  Attributes:
    member: index of the stream of each config.
  """

  def __init__(self, configs: Sequence[Config]):
    seeds = list(dict.fromkeys(data_seed(c) for c in configs))
    self.member = [seeds.index(data_seed(c)) for c in configs]
    self._iterators = [_iterator(configs[0], seed) for seed in seeds]

  def __next__(self) -> list[dict]:
    """Next batch of every stream."""
    return [next(iterator) for iterator in self._iterators]

  def __iter__(self):
    return self

  def get_state(self) -> list[dict]:
    """Position of every stream, as JSON holds it."""
    return [iterator.get_state() for iterator in self._iterators]

  def set_state(self, states: list[dict]) -> None:
    """Moves every stream.

    Raises:
      ValueError: the state belongs to another number of streams.
    """
    for iterator, state in zip(self._iterators, states, strict=True):
      iterator.set_state(state)


def _iterator(config: Config, seed: int):
  if config.data.source == anchor.SOURCE:
    return anchor.TrainIterator(seed=seed, batch_size=config.train.batch_size)
  return pipeline.train_iterator(
    config.data,
    seed=seed,
    batch_size=config.train.batch_size,
    seq_len=config.train.seq_len,
  )

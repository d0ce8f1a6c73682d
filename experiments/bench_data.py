"""Tokens a second that the input pipeline gives, from a prepared corpus.

  python -m experiments.bench_data --source=sample

Against two others: grain's own packing of the same documents (the same batches,
how it was before) and fixed windows of one array (no documents, no shuffle: an
upper bound). Best of several, as other programs share the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import grain
import numpy as np
import tensorflow_datasets as tfds

from gamma_jax.config import DataConfig
from gamma_jax.data import builder as builder_lib
from gamma_jax.data import pipeline
from gamma_jax.data import prepare as prepare_lib

SHAPES = ((8, 128), (16, 1024), (64, 2048))  # B, T


def grain_alone(data: DataConfig, batch_size: int, seq_len: int) -> Iterator:
  """Batches of tokens, packed by grain, a call for each document."""
  folder = prepare_lib.prepare(data)
  manifest = prepare_lib.read_manifest(folder)
  builder = tfds.builder_from_directory(folder / manifest['dataset'])
  eot = manifest['eot_id']

  def frame(example: dict) -> dict:
    tokens = np.pad(example['tokens'], 1, constant_values=eot)
    return {'tokens': tokens.astype(np.int32)}

  ds = grain.MapDataset.source(builder.as_data_source(builder_lib.TRAIN))
  ds = ds.seed(0).shuffle().repeat().map(frame)
  options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)
  ds = grain.experimental.ConcatThenSplitIterDataset(
    ds.to_iter_dataset(options), length_struct={'tokens': seq_len + 1}
  )
  return iter(ds.batch(batch_size, drop_remainder=True))


def windows(data: DataConfig, batch_size: int, seq_len: int) -> Iterator:
  """Batches of tokens: the file from its start to its end, again and again."""
  folder = prepare_lib.prepare(data)
  last = prepare_lib.read_manifest(folder)['vocab_size'] - 1
  flat = np.memmap(folder / builder_lib.TOKENS, np.min_scalar_type(last), 'r')
  size = batch_size * (seq_len + 1)
  while True:
    for start in range(0, len(flat) - size + 1, size):
      rows = flat[start : start + size].reshape(batch_size, seq_len + 1)
      yield {'tokens': rows.astype(np.int32)}


def speed(start: Callable[[], Iterator], seconds: float, repeats: int) -> float:
  """Tokens predicted a second, the best of `repeats`."""
  best = 0.0
  for _ in range(repeats):
    iterator = start()
    next(iterator)
    tokens, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds:
      rows = next(iterator)['tokens']
      tokens += rows.shape[0] * (rows.shape[1] - 1)
    best = max(best, tokens / passed)
  return best


def main() -> None:
  default = DataConfig()
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--source', default=default.source)
  parser.add_argument('--tokenizer', default=default.tokenizer)
  parser.add_argument('--dir', default=default.dir)
  parser.add_argument('--seconds', type=float, default=1.0)
  parser.add_argument('--repeats', type=int, default=5)
  args = parser.parse_args()
  data = DataConfig(args.source, args.tokenizer, dir=args.dir)
  counts = prepare_lib.read_manifest(prepare_lib.prepare(data))['splits']
  train = counts[builder_lib.TRAIN].values()
  tokens, documents = (
    sum(count[key] for count in train) for key in ('tokens', 'documents')
  )
  print(f'{tokens:,} tokens, {tokens / documents:.0f} a document')
  print('    B     T   ours Mtok/s   grain   ratio   windows   ratio')
  for shape in SHAPES:
    ours, slow, bound = (
      speed(start, args.seconds, args.repeats) / 1e6
      for start in (
        lambda shape=shape: pipeline.train_iterator(
          data, seed=0, batch_size=shape[0], seq_len=shape[1]
        ),
        lambda shape=shape: grain_alone(data, *shape),
        lambda shape=shape: windows(data, *shape),
      )
    )
    print(
      f'{shape[0]:5d} {shape[1]:5d} {ours:13.2f} {slow:7.2f}'
      f' {ours / slow:6.0f}x {bound:9.1f} {ours / bound:7.2f}'
    )


if __name__ == '__main__':
  main()

"""Batches of packed documents, with grain.

Every document is framed as [eot] tokens [eot], so that its first token and its
end are predicted too, and packed rows never attend or predict across documents
(segment ids, positions from 0). Letters: B batch, T tokens predicted in a row.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import grain
import numpy as np
import tensorflow_datasets as tfds
from absl import flags

from gamma_jax import errors
from gamma_jax.config import DataConfig
from gamma_jax.data import builder as builder_lib
from gamma_jax.data import order as order_lib
from gamma_jax.data import packing
from gamma_jax.data import prepare as prepare_lib

# Rows open at once when windows are packed for evaluation. Fixed: which windows
# share a row must not depend on the batch size.
EVAL_BINS = 64


def train_iterator(
  data: DataConfig,
  *,
  seed: int,
  batch_size: int,
  seq_len: int,
) -> grain.DatasetIterator:
  """Endless batches of {'tokens', 'segment_ids', 'positions'}, int32 [B, T+1].

  Each epoch is one permutation of all documents. A document cut by the end of a
  row goes on in the next one as a new segment.

  `get_state()` is a small JSON dict; after `set_state` the next batches are bit
  for bit those that were to come. A state belongs to one `data.workers`.

  Args:
    batch_size: B.
    seq_len: T.

  Raises:
    ConfigError: unknown part in the mixture, or less text than a batch.
  """
  folder = prepare_lib.prepare(data)
  counts = prepare_lib.read_manifest(folder)['splits'][builder_lib.TRAIN]
  mixture = _check_mixture(data, counts)
  _check_size(
    {part: counts[part] for part in mixture or counts},
    needed=batch_size * (seq_len + 1),
  )
  ds = packing.PackedDataset(
    folder, _order(counts, mixture, seed), batch_size, seq_len + 1
  )
  if data.workers:
    if not flags.FLAGS.is_parsed():  # grain reads absl's flags for its workers
      flags.FLAGS.mark_as_parsed()
    ds = ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=data.workers))
  return iter(ds)


def eval_batches(
  data: DataConfig, *, seq_len: int, batch_size: int, documents: int = 0
) -> grain.IterDataset:
  """Batches in which every token of the held-out documents is scored once.

  A framed document is cut in windows of T+1 tokens that overlap by one, so each
  token but the leading eot is the label of exactly one window, the closing eot
  included. Windows are packed in rows and see only themselves.

  Args:
    seq_len: T.
    batch_size: B; the last batch is padded, and rows are the same for any B.
    documents: the first so many documents in the order of `heldout_sources`;
      0: all.

  Returns:
    An iterable (as often as wanted) of {'inputs', 'labels', 'segment_ids',
    'positions', 'doc', 'label_index'}, int32 [B, T], and 'mask', bool [B, T]:
    the label is scored. `doc` counts held-out documents from 0, `label_index`
    the tokens of a document without its leading eot; both are -1 in padding.

  Raises:
    ConfigError: nothing is held out.
  """
  tokens = [t for _, t in heldout_documents(data)][: documents or None]
  manifest = prepare_lib.read_manifest(prepare_lib.prepare(data))
  frame = _Frame(manifest['eot_id'])
  windows = [
    (doc, start)
    for doc, ids in enumerate(tokens)
    for start in range(0, len(ids) + 1, seq_len)
  ]

  def cut(window: tuple[int, int]) -> dict[str, np.ndarray]:
    doc, start = window
    ids = frame.map({'tokens': tokens[doc]})['tokens']
    labels = ids[start + 1 : start + 1 + seq_len]
    return {
      'inputs': ids[start : start + len(labels)],
      'labels': labels,
      'doc': np.full(len(labels), doc, np.int32),
      'label_index': np.arange(start, start + len(labels), dtype=np.int32),
    }

  ds = grain.experimental.FirstFitPackIterDataset(
    grain.MapDataset.source(windows)
    .map(cut)
    .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)),
    length_struct=dict.fromkeys(
      ('inputs', 'labels', 'doc', 'label_index'), seq_len
    ),
    num_packing_bins=EVAL_BINS,
    shuffle_bins=False,
  )
  pad = functools.partial(
    grain.experimental.batch_and_pad, batch_size=batch_size
  )
  return ds.batch(batch_size, batch_fn=pad).map(_eval_batch)


def heldout_sources(data: DataConfig) -> list[str]:
  """The part of each held-out document, in the order of `doc` in evaluation."""
  return [part for part, _ in heldout_documents(data)]


class _Frame(grain.transforms.Map):
  """An example of the dataset -> [eot] tokens [eot], int32."""

  def __init__(self, eot_id: int):
    self._eot_id = eot_id

  def map(self, example: dict) -> dict[str, np.ndarray]:
    tokens = np.full(len(example['tokens']) + 2, self._eot_id, np.int32)
    tokens[1:-1] = example['tokens']
    return {'tokens': tokens}


def _eval_batch(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  mask = batch['inputs_segment_ids'] > 0
  return {
    'inputs': batch['inputs'],
    'labels': batch['labels'],
    'segment_ids': batch['inputs_segment_ids'],
    'positions': batch['inputs_positions'],
    'mask': mask,
    'doc': np.where(mask, batch['doc'], -1),
    'label_index': np.where(mask, batch['label_index'], -1),
  }


def _documents(folder: Path, split: str) -> grain.MapDataset:
  manifest = prepare_lib.read_manifest(folder)
  builder = tfds.builder_from_directory(folder / manifest['dataset'])
  return grain.MapDataset.source(builder.as_data_source(split))


def _order(
  counts: dict[str, dict[str, int]], mixture: dict[str, float], seed: int
) -> order_lib.Order:
  """In which order the training documents come."""
  if not mixture:
    everything = sum(count['documents'] for count in counts.values())
    return order_lib.Order(seed, ((0, everything),))
  ranges = _ranges(counts)
  return order_lib.Order(
    seed,
    tuple((ranges[part].start, counts[part]['documents']) for part in mixture),
    # Weights speak of tokens, the order counts documents.
    tuple(w / _mean_tokens(counts[part]) for part, w in mixture.items()),
  )


def _ranges(counts: dict[str, dict[str, int]]) -> dict[str, slice]:
  """Which examples are of which part: parts follow one another."""
  ends = itertools.accumulate(c['documents'] for c in counts.values())
  return {
    part: slice(end - counts[part]['documents'], end)
    for part, end in zip(counts, ends, strict=True)
  }


def heldout_documents(data: DataConfig) -> list[tuple[str, np.ndarray]]:
  """(part, tokens) of all held-out documents, parts taking turns.

  Within a part the order is that of the documents' ids, which come from their
  text: the first n are the same whatever `heldout_percent` is (if it gives n).

  Raises:
    ConfigError: nothing is held out.
  """
  folder = prepare_lib.prepare(data)
  manifest = prepare_lib.read_manifest(folder)
  counts = manifest['splits'][builder_lib.HELDOUT]
  if not any(count['documents'] for count in counts.values()):
    raise errors.ConfigError(
      f'data.heldout_percent: {data.heldout_percent} holds out no document of'
      f' {data.source}; raise it'
    )
  documents = _documents(folder, builder_lib.HELDOUT)
  parts = []
  for part, span in _ranges(counts).items():
    examples = sorted(documents[span], key=lambda example: example['id'])
    parts.append([(part, example['tokens']) for example in examples])
  turns = itertools.zip_longest(*parts)
  return [doc for turn in turns for doc in turn if doc is not None]


def _mean_tokens(count: dict[str, int]) -> float:
  return count['tokens'] / count['documents'] + 2  # with both eots


def _check_mixture(
  data: DataConfig, counts: dict[str, dict[str, int]]
) -> dict[str, float]:
  mixture = dict(data.mixture)
  if len(mixture) != len(data.mixture):
    raise errors.ConfigError('data.mixture: a part is named twice')
  for part, weight in mixture.items():
    if part not in counts:
      raise errors.ConfigError(
        f'data.mixture: no part {part!r} in {data.source}; it has'
        f' {", ".join(counts)}'
      )
    if not counts[part]['documents']:
      raise errors.ConfigError(f'data.mixture: no training document in {part}')
    if not 0 < weight < float('inf'):
      raise errors.ConfigError(
        f'data.mixture: weight {weight} of {part} must be above 0'
      )
  return mixture


def _check_size(counts: dict[str, dict[str, int]], *, needed: int) -> None:
  tokens = sum(c['tokens'] + 2 * c['documents'] for c in counts.values())
  if tokens < needed:
    raise errors.ConfigError(
      f'data: {tokens} training tokens are fewer than one batch of {needed};'
      ' lower train.batch_size or train.seq_len, or add text'
    )

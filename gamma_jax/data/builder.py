"""Writes encoded documents as array_record files, with TFDS.

TensorFlow is never imported: TFDS reads and writes array_record without it.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from gamma_jax import errors
from gamma_jax.data import foreign
from gamma_jax.data import shards as shards_lib
from gamma_jax.data import tokenizer as tokenizer_lib

# The training documents once more, framed and end to end, and where each ends:
# an epoch reads them in a random order, which costs far less from one array
# than from records.
TOKENS, ENDS = 'train.tokens', 'train.ends.npy'
TRAIN, HELDOUT = SPLITS = ('train', 'heldout')


def split_of(document: int, heldout_percent: float) -> str:
  """The split of a document id, whatever else the corpus holds.

  The same text is never on both sides, and a larger percentage only adds
  documents to the held-out ones.
  """
  return HELDOUT if document < heldout_percent / 100 * 2**63 else TRAIN


class Documents(tfds.core.GeneratorBasedBuilder):
  """One example a document, in the order of the source.

  Attributes:
    counts: {split: {part: {documents, tokens, bytes}}}, filled when written;
      tokens are those of the text, without any special.
    content: SHA-256 over all text, filled when written.
    duplicates: {split: documents whose text came before}, filled when written;
      they are counted, not dropped.
    changed: documents that the tokenizer does not give back as they were.
  """

  VERSION = tfds.core.Version('1.0.0')

  def __init__(
    self,
    *,
    data_dir: Path,
    shards: Iterable[shards_lib.Shard],
    parts: tuple[str, ...],
    tokenizer: tokenizer_lib.Tokenizer | foreign.Foreign,
    heldout_percent: float,
    progress: Callable[[int], None],
  ):
    """`shards` are read once a split; `progress` gets positions in the source.

    Args:
      parts: all that the source names, in its order.
    """
    self.shards, self.tokenizer = shards, tokenizer
    self.heldout_percent, self.progress = heldout_percent, progress
    super().__init__(file_format='array_record', data_dir=data_dir)
    self.counts: dict[str, dict[str, dict[str, int]]] = {
      split: {part: {'documents': 0, 'tokens': 0, 'bytes': 0} for part in parts}
      for split in SPLITS
    }
    self.content = hashlib.sha256()
    self.duplicates: dict[str, int] = {}
    self.changed = 0
    self._folder = data_dir

  def _info(self) -> tfds.core.DatasetInfo:
    features = {
      'tokens': tfds.features.Tensor(shape=(None,), dtype=self.tokenizer.dtype),
      'source': tfds.features.Text(),
      'id': np.int64,
      'bytes': np.int64,
    }
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.FeaturesDict(features),
      # Keeps the order of the source: a part is then a range of examples.
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
    del dl_manager  # nothing is downloaded
    splits = {}
    for split in SPLITS:
      examples = self._generate_examples(split)
      # TFDS refuses to write an empty split, so look before naming it.
      if (first := next(examples, None)) is not None:
        splits[split] = itertools.chain([first], examples)
    if TRAIN not in splits:
      raise errors.ConfigError('data.source: no document to train on')
    return splits

  def _generate_examples(self, split: str) -> Iterator[tuple[int, dict]]:
    # Each split reads all shards; only ids and ends are kept, 16 bytes a
    # document.
    key, ids, ends = 0, array.array('q'), array.array('q', [0])
    eot = np.array(self.tokenizer.eot_id, self.tokenizer.dtype).tobytes()
    with contextlib.ExitStack() as stack:
      if split == TRAIN:
        flat = stack.enter_context((self._folder / TOKENS).open('wb'))
      for shard in self.shards:
        for part, text, document, tokens in shard.documents():
          if split_of(document, self.heldout_percent) != split:
            continue
          self._count(split, part, text, tokens)
          ids.append(document)
          if split == TRAIN:
            flat.write(eot + tokens.tobytes() + eot)
            ends.append(ends[-1] + len(tokens) + 2)
          example = {'tokens': tokens, 'source': part, 'id': document}
          yield key, example | {'bytes': len(text)}
          key += 1
        if split == TRAIN:
          self.changed += shard.changed
          self.progress(shard.texts.position)
    self.duplicates[split] = len(ids) - len(np.unique(ids))
    if split == TRAIN:
      np.save(self._folder / ENDS, np.array(ends))

  def _count(
    self, split: str, part: str, text: bytes, tokens: np.ndarray
  ) -> None:
    count = self.counts[split][part]
    count['documents'] += 1
    count['tokens'] += len(tokens)
    count['bytes'] += len(text)
    self.content.update(len(text).to_bytes(8, 'big') + text)

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
from array_record.python import array_record_module
from tensorflow_datasets.core.utils import shard_utils

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


class Documents(tfds.core.dataset_builder.FileReaderBuilder):
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
    """`shards` are read twice a split; `progress` gets positions in the source.

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

  def _download_and_prepare(
    self, dl_manager: Any, download_config: Any = None
  ) -> None:
    del dl_manager, download_config  # nothing is downloaded
    looks = {}
    for split in SPLITS:
      look = self._look(split)
      # TFDS knows no empty split, so look before naming it.
      if (first := next(look, None)) is not None:
        looks[split] = itertools.chain([first], look)
    if TRAIN not in looks:
      raise errors.ConfigError('data.source: no document to train on')
    infos = [
      self._write(split, array.array('q', sizes))
      for split, sizes in looks.items()
    ]
    self.info.set_splits(tfds.core.splits.SplitDict(infos))

  def _look(self, split: str) -> Iterator[int]:
    """Counts what `split` holds and yields the size of each record.

    Writes the flat copy of the training documents, too.
    """
    # All shards are read; only numbers are kept, 24 bytes a document.
    ids, ends = array.array('q'), array.array('q', [0])
    eot = np.array(self.tokenizer.eot_id, self.tokenizer.dtype).tobytes()
    with contextlib.ExitStack() as stack:
      if split == TRAIN:
        flat = stack.enter_context((self._folder / TOKENS).open('wb'))
      for shard in self.shards:
        for part, text, document, tokens, record in shard.documents():
          if split_of(document, self.heldout_percent) != split:
            continue
          self._count(split, part, text, tokens)
          ids.append(document)
          if split == TRAIN:
            flat.write(eot + tokens.tobytes() + eot)
            ends.append(ends[-1] + len(tokens) + 2)
          yield len(record)
        if split == TRAIN:
          self.changed += shard.changed
          self.progress(shard.texts.position)
    self.duplicates[split] = len(ids) - len(np.unique(ids))
    if split == TRAIN:
      np.save(self._folder / ENDS, np.array(ends))

  def _write(self, split: str, sizes: array.array) -> tfds.core.SplitInfo:
    """Writes the records of `split`, in as many files as TFDS would."""
    number, total = len(sizes), sum(sizes)
    files = shard_utils.ShardConfig.calculate_number_shards(total, number)
    ends = [0, *shard_utils.get_shard_boundaries(number, files)]
    template = self._get_filename_template(split_name=split)
    records = (
      record
      for shard in self.shards
      for _, _, document, _, record in shard.documents()
      if split_of(document, self.heldout_percent) == split
    )
    lengths = np.diff(ends).tolist()
    for index, length in enumerate(lengths):
      path = template.sharded_filepath(shard_index=index, num_shards=files)
      writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
      for record in itertools.islice(records, length):
        writer.write(record)
      writer.close()
    return tfds.core.SplitInfo(
      name=split,
      shard_lengths=lengths,
      num_bytes=total,
      filename_template=template,
    )

  def _count(
    self, split: str, part: str, text: bytes, tokens: np.ndarray
  ) -> None:
    count = self.counts[split][part]
    count['documents'] += 1
    count['tokens'] += len(tokens)
    count['bytes'] += len(text)
    self.content.update(len(text).to_bytes(8, 'big') + text)

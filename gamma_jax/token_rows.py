"""Per-token rows on disk, in blocks that fit in memory.

`<folder>/00000.npz`, `00001.npz`, ... hold the columns of token_gap.Block:
doc, position, token, nll_a, nll_b.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from gamma_jax.analysis.token_gap import Block
from gamma_jax.errors import ConfigError

ROWS = 1 << 20  # of a block: 20 MB in memory


def from_batch(
  batch: dict[str, np.ndarray], nll_a: np.ndarray, nll_b: np.ndarray
) -> Block:
  """Scored tokens of a batch of data.pipeline.eval_batches, row after row.

  Args:
    batch: [B, T] each.
    nll_a: [B, T], nats.
    nll_b: [B, T], nats.
  """
  scored = batch['mask']
  return Block(
    doc=batch['doc'][scored],
    position=batch['label_index'][scored],
    token=batch['labels'][scored],
    nll_a=np.asarray(nll_a, np.float32)[scored],
    nll_b=np.asarray(nll_b, np.float32)[scored],
  )


def write(folder: Path, blocks: Iterable[Block], rows: int = ROWS) -> Rows:
  """Writes blocks joined to at least `rows` rows a file (the last: fewer).

  A block is never cut, so that what is next to one another in it stays so.
  """
  folder.mkdir(parents=True)
  held: list[Block] = []
  files = 0

  def flush():
    nonlocal files
    joined = Block(*map(np.concatenate, zip(*held, strict=True)))
    np.savez_compressed(folder / f'{files:05d}.npz', **joined._asdict())
    files += 1
    held.clear()

  for block in blocks:
    held.append(block)
    if sum(len(b.doc) for b in held) >= rows:
      flush()
  if held:
    flush()
  return Rows(folder)


def need_parquet() -> None:
  """Raises ConfigError where to_parquet has no library."""
  try:
    importlib.import_module('pyarrow.parquet')
  except ImportError as error:
    raise ConfigError(
      "--parquet needs pyarrow: pip install 'gamma_jax[parquet]'"
    ) from error


def to_parquet(rows: Iterable[Block], path: Path) -> None:
  """The same columns as one Parquet file, a row group a block."""
  pyarrow = importlib.import_module('pyarrow')
  parquet = importlib.import_module('pyarrow.parquet')
  writer = None
  try:
    for block in rows:
      table = pyarrow.table(block._asdict())
      writer = writer or parquet.ParquetWriter(path, table.schema)
      writer.write_table(table)
  finally:
    if writer:
      writer.close()


class Rows:
  """The blocks of a folder, one in memory at a time, as often as wanted."""

  def __init__(self, folder: Path):
    self._folder = folder

  def __iter__(self) -> Iterator[Block]:
    for path in sorted(self._folder.glob('*.npz')):
      with np.load(path) as columns:
        yield Block(**columns)

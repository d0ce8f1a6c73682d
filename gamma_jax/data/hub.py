"""Documents in files of columns, and in data sets that a hub names.

A library is imported when its kind of source is read, so none is required.
Names of real sets, with the field `text` (the default column) unless said:

- FineWeb-Edu: hf:HuggingFaceFW/fineweb-edu,config=sample-10BT
- C4: hf:allenai/c4,config=en (tfds:c4/en where a copy was prepared)
- SkyPile: hf:Skywork/SkyPile-150B
- ChineseWebText: hf:CASIA-LM/ChineseWebText2.0 (the first edition, without the
  2.0, has a list of paragraphs for a text, which is read as well)

The names are those that public code loads; no hub could be asked here.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from gamma_jax import errors

TIMEOUT = 10  # seconds to reach a hub


class Document(NamedTuple):
  part: str
  text: str | bytes
  position: int  # how far into the source (out of its `size`) this one ends


@dataclasses.dataclass(frozen=True)
class Files:
  """Local files; the folder of a file names its part.

  Attributes:
    files: sorted by part.
  """

  kind: str
  files: tuple[Path, ...]

  @property
  def parts(self) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(folder_of, self.files)))

  @property
  def size(self) -> int:
    return sum(path.stat().st_size for path in self.files)

  @property
  def identity(self) -> list:
    """Changes when the text does; by name, size and time, so it is cheap."""
    stats = [path.stat() for path in self.files]
    return [
      [str(path.absolute()), stat.st_size, stat.st_mtime_ns]
      for path, stat in zip(self.files, stats, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Parquet(Files):
  """Parquet files, a document a row; the folder of a file names its part."""

  column: str

  @property
  def identity(self) -> list:
    return [self.column, *super().identity]

  def documents(self) -> Iterator[Document]:
    """Yields documents that are not empty.

    Raises:
      ConfigError: not a Parquet file, or no column of text of that name.
    """
    pyarrow = _need('pyarrow', 'parquet')
    parquet = importlib.import_module('pyarrow.parquet')
    before = 0
    for path in self.files:
      try:
        with parquet.ParquetFile(path) as file:
          _check_column(file.schema_arrow.names, self.column, str(path))
          for batch in file.iter_batches(1024, columns=[self.column]):
            for text in batch.column(0).to_pylist():
              yield from _document(folder_of(path), text, self.column, before)
      except pyarrow.ArrowInvalid as error:
        raise errors.ConfigError(
          f'data.source: {path} is not a Parquet file ({_line(error)})'
        ) from error
      before += path.stat().st_size


@dataclasses.dataclass(frozen=True)
class HuggingFace:
  """A data set of the hub, or a local folder of files, read as a stream."""

  name: str
  config: str | None = None
  split: str = 'train'
  column: str = 'text'
  kind: str = 'hf'
  size: int = 1  # unknown before the end

  @property
  def parts(self) -> tuple[str, ...]:
    return (self.name.rstrip('/').rpartition('/')[2],)

  @property
  def identity(self) -> list:
    """The name alone: a run must not need the hub once its text is prepared."""
    return [self.name, self.config, self.split, self.column]

  def documents(self) -> Iterator[Document]:
    """Yields documents that are not empty.

    Raises:
      ConfigError: no such data set, split or column, or no network.
    """
    for row in self.rows():
      _check_column(list(row), self.column, f'hf:{self.name}')
      yield from _document(self.parts[0], row[self.column], self.column, 0)

  def rows(self) -> Iterator[dict]:
    """Yields whole rows.

    Raises:
      ConfigError: no such data set or split, or no network.
    """
    datasets = _need('datasets', 'hub')
    if not Path(self.name).expanduser().exists():
      _check_network(os.environ.get('HF_ENDPOINT', 'https://huggingface.co'))
    try:
      rows = datasets.load_dataset(
        str(Path(self.name).expanduser()) if '~' in self.name else self.name,
        self.config,
        split=self.split,
        streaming=True,
      )
    except (ValueError, OSError) as error:
      raise errors.ConfigError(
        f'hf:{self.name} cannot be read ({_line(error)})'
      ) from error
    yield from rows


@dataclasses.dataclass(frozen=True)
class Tfds:
  """A TFDS data set that lies prepared in `data_dir`, as array_record."""

  name: str
  split: str = 'train'
  column: str = 'text'
  data_dir: str | None = None
  kind: str = 'tfds'
  size: int = 1

  @property
  def parts(self) -> tuple[str, ...]:
    return (self.name.replace('/', '-').replace(':', '-'),)

  @property
  def identity(self) -> list:
    return [self.name, self.split, self.column, self.data_dir]

  def documents(self) -> Iterator[Document]:
    """Yields documents that are not empty.

    Raises:
      ConfigError: it is not there, or has no such split or column.
    """
    for row in self.rows():
      _check_column(list(row), self.column, f'tfds:{self.name}')
      yield from _document(self.parts[0], row[self.column], self.column, 0)

  def rows(self) -> Iterator[dict]:
    """Yields whole rows, text as bytes and numbers as NumPy's.

    Raises:
      ConfigError: it is not there, or has no such split.
    """
    tfds = _need('tensorflow_datasets', 'hub')
    try:
      builder = tfds.builder(
        self.name, data_dir=self.data_dir, file_format='array_record'
      )
      # Never downloads: without a network that hangs, and large sets need Beam.
      if not builder.is_prepared():
        raise ValueError('not prepared in data_dir')
      rows = builder.as_data_source(self.split)
    except (ValueError, OSError, tfds.core.DatasetNotFoundError) as error:
      raise errors.ConfigError(
        f'tfds:{self.name} cannot be read ({_line(error)});'
        ' prepare it with TFDS as array_record, or use hf: or parquet:'
      ) from error
    yield from rows


def open_hub(kind: str, spec: str) -> HuggingFace | Tfds:
  """Returns the source of 'NAME,option=value,...'.

  Raises:
    ConfigError: an unknown option.
  """
  source = {'hf': HuggingFace, 'tfds': Tfds}[kind]
  name, *options = spec.split(',')
  pairs = dict(option.partition('=')[::2] for option in options)
  known = {f.name for f in dataclasses.fields(source)} - {
    'name',
    'kind',
    'size',
  }
  if unknown := [key for key in pairs if key not in known or not pairs[key]]:
    raise errors.ConfigError(
      f'{kind}:{name} has no option {unknown[0]!r}; it knows'
      f' {", ".join(sorted(known))}, each with =VALUE'
    )
  return source(name, **pairs)


def folder_of(path: Path) -> str:
  return path.absolute().parent.name


def _document(
  part: str, text: object, column: str, position: int
) -> Iterator[Document]:
  if isinstance(text, list) and all(isinstance(line, str) for line in text):
    text = '\n'.join(line.rstrip('\n') for line in text)  # of paragraphs
  if isinstance(text, (str, bytes)):
    if text:
      yield Document(part, text, position)
  elif text is not None:
    raise errors.ConfigError(
      f'data.source: column {column!r} holds {type(text).__name__}, not text'
    )


def _check_column(names: list[str], column: str, where: str) -> None:
  if column not in names:
    raise errors.ConfigError(
      f'{where} has no column {column!r}; it has {", ".join(names)}'
    )


def _need(module: str, extra: str) -> ModuleType:
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise errors.ConfigError(
      f"this source needs {module}: pip install 'gamma_jax[{extra}]'"
    ) from error


def _check_network(url: str) -> None:
  """Asks once, as the library would retry for minutes."""
  if os.environ.get('HF_HUB_OFFLINE', '0').lower() in (
    '1',
    'true',
    'yes',
    'on',
  ):
    return  # it reads what it has kept, and fails at once
  try:
    urllib.request.urlopen(url, timeout=TIMEOUT).close()
  except urllib.error.HTTPError as error:
    error.close()  # it answers
  except OSError as error:
    raise errors.ConfigError(
      f'no network to {url} ({_line(error)}); fetch the files'
      ' elsewhere and use parquet: or jsonl:, or set HF_HUB_OFFLINE=1 to read'
      ' what the datasets library has kept'
    ) from error


def _line(error: BaseException) -> str:
  return ' '.join(str(error).split())[:200]

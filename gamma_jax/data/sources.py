"""Where documents come from: the sample, local files, hubs, random tokens.

A source has parts (languages, domains); their documents come part after part,
in a fixed order.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from gamma_jax import errors
from gamma_jax.data import anchor, hub
from gamma_jax.data import tokenizer as tokenizer_lib
from gamma_jax.data.hub import Document

KINDS = (
  'sample, synthetic or jsonl:/path/*.jsonl, text:/path/*/*.txt,'
  ' parquet:/path/*.parquet[:COLUMN], hf:NAME[,config=..,split=..,column=..],'
  ' tfds:NAME[,split=..,column=..,data_dir=..], or several joined by +'
)
# A '+' in a path is a '+', unless a kind follows it.
_JOINT = re.compile(
  r'\+(?=(?:jsonl|text|parquet|hf|tfds):|(?:sample|synthetic)(?:\+|$))'
)


@dataclasses.dataclass(frozen=True)
class JsonLines(hub.Files):
  """Files of JSON lines with a 'text'; a file's stem names its part."""

  @property
  def parts(self) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(_part, self.files)))

  @property
  def identity(self) -> list:
    """Changes when the text does; by name, size and time, so it is cheap."""
    if self.kind == 'sample':  # times differ between checkouts: by content
      return [hashlib.sha256(p.read_bytes()).hexdigest() for p in self.files]
    return super().identity

  def documents(self) -> Iterator[Document]:
    """Yields documents that are not empty.

    Raises:
      ConfigError: a line that is not a JSON object with a string 'text'.
    """
    before = 0
    for path in self.files:
      with path.open('rb') as raw:
        lines = gzip.open(raw) if path.suffix == '.gz' else raw
        for number, line in enumerate(lines, 1):
          text = _text(line, path, number) if line.strip() else ''
          if text:
            yield Document(_part(path), text, before + raw.tell())
        before += raw.tell()


@dataclasses.dataclass(frozen=True)
class TextFiles(hub.Files):
  """Plain files, a document each, of any bytes; the folder names the part."""

  def documents(self) -> Iterator[Document]:
    """Yields documents that are not empty."""
    before = 0
    for path in self.files:
      text = path.read_bytes()
      before += len(text)
      if text:
        yield Document(_folder(path), text, before)


@dataclasses.dataclass(frozen=True)
class Synthetic:
  """Documents of uniformly random tokens: nothing to learn, for tests."""

  tokenizer: tokenizer_lib.Tokenizer
  parts: tuple[str, ...] = ('a', 'b')
  documents_per_part: int = 400
  longest: int = 300  # tokens
  kind: str = 'synthetic'

  @property
  def size(self) -> int:
    return self.documents_per_part * len(self.parts)

  @property
  def identity(self) -> list:
    return [*self.parts, self.documents_per_part, self.longest]

  def documents(self) -> Iterator[Document]:
    rng = np.random.default_rng(0)
    for i in range(self.size):
      length = rng.integers(1, self.longest)
      ids = rng.integers(self.tokenizer.eot_id, size=length)
      part = self.parts[i // self.documents_per_part]
      yield Document(part, self.tokenizer.decode(ids), i + 1)


@dataclasses.dataclass(frozen=True)
class Several:
  """Sources one after another, so that a mixture can weigh their parts.

  Parts keep their names; a name that two sources have is '1:name', '2:name'.
  """

  sources: tuple[Source, ...]
  kind: str = 'several'

  @property
  def parts(self) -> tuple[str, ...]:
    return tuple(name for names in self._names() for name in names.values())

  @property
  def size(self) -> int:
    return sum(source.size for source in self.sources)

  @property
  def identity(self) -> list:
    return [[source.kind, source.identity] for source in self.sources]

  def documents(self) -> Iterator[Document]:
    """Raises what the documents of one of them raise."""
    before = 0
    for source, names in zip(self.sources, self._names(), strict=True):
      for part, text, position in source.documents():
        yield Document(names[part], text, before + position)
      before += source.size

  def _names(self) -> list[dict[str, str]]:
    """{part: its name here} of each source."""
    times = collections.Counter(p for s in self.sources for p in s.parts)
    return [
      {p: p if times[p] == 1 else f'{number}:{p}' for p in source.parts}
      for number, source in enumerate(self.sources, 1)
    ]


Source = hub.Files | hub.HuggingFace | hub.Tfds | Synthetic | Several


def open_source(source: str, tokenizer: tokenizer_lib.Tokenizer) -> Source:
  """Returns the source that `data.source` names.

  Raises:
    ConfigError: unknown kind or option, or no file there.
  """
  one, *more = (_open(name, tokenizer) for name in _JOINT.split(source))
  return Several((one, *more)) if more else one


def _open(source: str, tokenizer: tokenizer_lib.Tokenizer) -> Source:
  kind, _, pattern = source.partition(':')
  if source == anchor.SOURCE:
    raise errors.ConfigError(
      f'data.source: {source!r} is drawn while training; nothing to prepare'
    )
  if source == 'synthetic':
    return Synthetic(tokenizer)
  if source == 'sample':
    return JsonLines(kind, _find(f'{tokenizer_lib.SAMPLE}/*.jsonl.gz', _part))
  if pattern and kind == 'jsonl':
    return JsonLines(kind, _find(pattern, _part))
  if pattern and kind == 'text':
    return TextFiles(kind, _find(pattern, _folder))
  if pattern and kind == 'parquet':
    pattern, _, column = pattern.partition(':')
    return hub.Parquet(kind, _find(pattern, _folder), column or 'text')
  if pattern and kind in ('hf', 'tfds'):
    return hub.open_hub(kind, pattern)
  raise errors.ConfigError(
    f'data.source: {source!r} is not {KINDS}, nor {anchor.SOURCE!r}'
  )


def _find(pattern: str, part: Callable[[Path], str]) -> tuple[Path, ...]:
  found = glob.glob(str(Path(pattern).expanduser()), recursive=True)
  files = [path for path in map(Path, found) if path.is_file()]
  if not files:
    raise errors.ConfigError(f'data.source: no file matches {pattern}')
  return tuple(sorted(files, key=lambda path: (part(path), path)))


_folder = hub.folder_of


def _part(path: Path) -> str:
  return path.name.removesuffix('.gz').rpartition('.')[0] or path.name


def _text(line: bytes, path: Path, number: int) -> str:
  try:
    text = json.loads(line)['text']
  except (ValueError, TypeError, KeyError):
    text = None
  if not isinstance(text, str):
    raise errors.ConfigError(
      f"data.source: {path}:{number} is not a JSON object with a string 'text'"
    )
  return text

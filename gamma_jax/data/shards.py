"""A source in shards: consecutive documents and their tokens, a file each.

Where a shard ends is decided by the text alone, never by who reads or encodes
it. A file says of which text it is and is renamed when whole, so that one left
by a kill is either used as it is or made again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gamma_jax.data import foreign, records
from gamma_jax.data import tokenizer as tokenizer_lib
from gamma_jax.data.hub import Document

SIZE = 2**22  # bytes of text: half a second of work or less
_LAYOUT = 1  # raise it when the same shard would give another file
_CHECK = 4  # bytes of a checksum


def document_id(text: bytes) -> int:
  """A number in [0, 2^63) from the text alone."""
  # With a prefix of our own: a corpus that was itself sampled by a plain hash
  # of its text (as our sample was) must not have its split decided by that.
  digest = hashlib.sha256(b'gamma_jax document\0' + text).digest()
  return int.from_bytes(digest[:8], 'big') >> 1


@dataclasses.dataclass(frozen=True)
class Texts:
  """Consecutive documents of a source, at least one.

  Attributes:
    position: how far into the source the last one ends.
    parts: the part of each, str [n].
    data: all texts end to end.
    ends: where each ends in `data`, int64 [n].
  """

  position: int
  parts: np.ndarray
  data: bytes
  ends: np.ndarray

  def __iter__(self) -> Iterator[bytes]:
    return _pieces(self.data, self.ends)


@dataclasses.dataclass(frozen=True)
class Shard:
  """Texts and what a tokenizer makes of them.

  Attributes:
    ids: `document_id` of each, int64 [n].
    tokens: of all documents end to end, without any special.
    ends: where each ends in `tokens`, int64 [n].
    records: the messages of `records.serialize` end to end.
    record_ends: where each ends in `records`, int64 [n].
    changed: documents that the tokenizer does not give back as they were.
  """

  texts: Texts
  ids: np.ndarray
  tokens: np.ndarray
  ends: np.ndarray
  records: bytes
  record_ends: np.ndarray
  changed: int

  def documents(self) -> Iterator[tuple[str, bytes, int, np.ndarray, bytes]]:
    """Yields (part, text, id, tokens, record)."""
    return zip(
      self.texts.parts.tolist(),
      self.texts,
      self.ids.tolist(),
      _pieces(self.tokens, self.ends),
      _pieces(self.records, self.record_ends),
      strict=True,
    )


def cut(documents: Iterable[Document]) -> Iterator[Texts]:
  """Yields all documents in their order, SIZE bytes of text at a time."""
  parts, texts, size = [], [], 0
  for part, text, position in documents:
    if isinstance(text, str):
      text = text.encode('utf-8', 'surrogatepass')
    parts.append(part)
    texts.append(text)
    size += len(text)
    if size >= SIZE:
      yield _join(position, parts, texts)
      parts, texts, size = [], [], 0
  if texts:
    yield _join(position, parts, texts)


def encode(
  texts: Texts, tokenizer: tokenizer_lib.Tokenizer | foreign.Foreign
) -> Shard:
  """Raises ConfigError when the tokenizer cannot hold a text."""
  tokens = [tokenizer.encode(text) for text in texts]
  changed = 0
  if not tokenizer.exact:
    changed = sum(
      tokenizer.decode(ids) != text
      for ids, text in zip(tokens, texts, strict=True)
    )
  ids = np.array([document_id(text) for text in texts], np.int64)
  ends = np.cumsum([len(one) for one in tokens])
  tokens = np.concatenate(tokens)
  sizes = np.diff(texts.ends, prepend=0)
  made = records.serialize(texts.parts.tolist(), ids, sizes, tokens, ends)
  record_ends = np.cumsum([len(record) for record in made])
  return Shard(texts, ids, tokens, ends, b''.join(made), record_ends, changed)


def make(
  texts: Texts,
  path: Path,
  tokenizer: tokenizer_lib.Tokenizer | foreign.Foreign,
) -> bool:
  """Makes the file `path` hold the shard; whether there was any need to.

  Raises:
    ConfigError: see `encode`.
    OSError: the file cannot be written.
  """
  key = _key(texts, tokenizer.fingerprint)
  if _load(path).get('key') == key:
    return False
  shard = encode(texts, tokenizer)
  rest = {'key': key, 'position': texts.position, 'changed': shard.changed}
  arrays = {
    'parts': texts.parts,
    'text': np.frombuffer(texts.data, np.uint8),
    'text_ends': texts.ends,
    'ids': shard.ids,
    'tokens': shard.tokens,
    'ends': shard.ends,
    'records': np.frombuffer(shard.records, np.uint8),
    'record_ends': shard.record_ends,
  }
  temporary = path.with_name(f'.{uuid.uuid4().hex}.tmp')
  try:
    _save(temporary, rest, arrays)
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)
  return True


def read(path: Path) -> Shard:
  """Raises OSError when the file is not there or not as it was written."""
  if not (found := _load(path)):
    raise OSError(f'{path} is damaged; the same command makes it again')
  return Shard(
    Texts(
      found['position'],
      found['parts'],
      found['text'].tobytes(),
      found['text_ends'],
    ),
    found['ids'],
    found['tokens'],
    found['ends'],
    found['records'].tobytes(),
    found['record_ends'],
    found['changed'],
  )


def _save(path: Path, rest: dict, arrays: dict[str, np.ndarray]) -> None:
  """A checksum of the others, a line of JSON, and the arrays end to end."""
  rest['arrays'] = [[k, a.dtype.str, a.size] for k, a in arrays.items()]
  pieces = [json.dumps(rest).encode() + b'\n']
  pieces += [array.tobytes() for array in arrays.values()]
  check = 0
  for piece in pieces:
    check = zlib.crc32(piece, check)
  with path.open('wb') as file:
    file.writelines([check.to_bytes(_CHECK, 'big'), *pieces])


def _load(path: Path) -> dict[str, Any]:
  """What `_save` was given; nothing when that is not there or not whole."""
  try:
    data = path.read_bytes()
  except FileNotFoundError:
    return {}
  check = zlib.crc32(memoryview(data)[_CHECK:])
  if len(data) <= _CHECK or data[:_CHECK] != check.to_bytes(_CHECK, 'big'):
    return {}
  place = data.index(b'\n', _CHECK) + 1
  found = json.loads(data[_CHECK:place])
  for name, dtype, size in found.pop('arrays'):
    found[name] = np.frombuffer(data, dtype, size, place)
    place += found[name].nbytes
  return found


def _pieces(whole: Any, ends: np.ndarray) -> Iterator[Any]:
  """`whole`, bytes or an array, cut at `ends`."""
  start = 0
  for end in ends.tolist():
    yield whole[start:end]
    start = end


def _join(position: int, parts: list[str], texts: list[bytes]) -> Texts:
  ends = np.cumsum([len(text) for text in texts])
  return Texts(position, np.array(parts), b''.join(texts), ends)


def _key(texts: Texts, tokenizer: str) -> str:
  """Of all that decides what a shard holds."""
  names = [_LAYOUT, tokenizer, texts.parts.tolist(), texts.ends.tolist()]
  digest = hashlib.sha256(json.dumps(names).encode())
  digest.update(texts.data)
  return digest.hexdigest()

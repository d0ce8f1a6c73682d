"""A source in shards: consecutive documents and their tokens, a file each.

Where a shard ends is decided by the text alone, never by who reads or encodes
it. A file says of which text it is and is renamed when whole, so that one left
by a kill is either used as it is or made again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from gamma_jax.data import foreign
from gamma_jax.data import tokenizer as tokenizer_lib
from gamma_jax.data.hub import Document

SIZE = 2**22  # bytes of text: half a second of work or less
_DIGEST = hashlib.sha256().digest_size


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
    start = 0
    for end in self.ends.tolist():
      yield self.data[start:end]
      start = end


@dataclasses.dataclass(frozen=True)
class Shard:
  """Texts and what a tokenizer makes of them.

  Attributes:
    ids: `document_id` of each, int64 [n].
    tokens: of all documents end to end, without any special.
    ends: where each ends in `tokens`, int64 [n].
    changed: documents that the tokenizer does not give back as they were.
  """

  texts: Texts
  ids: np.ndarray
  tokens: np.ndarray
  ends: np.ndarray
  changed: int

  def documents(self) -> Iterator[tuple[str, bytes, int, np.ndarray]]:
    """Yields (part, text, id, tokens)."""
    yield from zip(
      self.texts.parts.tolist(),
      self.texts,
      self.ids.tolist(),
      np.split(self.tokens, self.ends[:-1]),
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
  ends = np.cumsum([len(ids) for ids in tokens])
  return Shard(texts, ids, np.concatenate(tokens), ends, changed)


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
  file = io.BytesIO()
  np.savez(
    file,
    key=key,
    position=texts.position,
    parts=texts.parts,
    text=np.frombuffer(texts.data, np.uint8),
    text_ends=texts.ends,
    ids=shard.ids,
    tokens=shard.tokens,
    ends=shard.ends,
    changed=shard.changed,
  )
  temporary = path.with_name(f'.{uuid.uuid4().hex}.tmp')
  try:
    with temporary.open('wb') as out:
      out.write(hashlib.sha256(file.getbuffer()).digest())
      out.write(file.getbuffer())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)
  return True


def read(path: Path) -> Shard:
  """Raises OSError when the file is not there or not as it was written."""
  if not (found := _load(path)):
    raise OSError(f'{path} is damaged; the same command makes it again')
  texts = Texts(
    int(found['position']),
    found['parts'],
    found['text'].tobytes(),
    found['text_ends'],
  )
  ids, tokens, ends = (found[name] for name in ('ids', 'tokens', 'ends'))
  return Shard(texts, ids, tokens, ends, int(found['changed']))


def _load(path: Path) -> dict[str, np.ndarray]:
  """The arrays of a file; none when it is not there or not whole."""
  try:
    data = memoryview(path.read_bytes())
  except FileNotFoundError:
    return {}
  if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
    return {}
  with np.load(io.BytesIO(data[_DIGEST:])) as file:
    return {name: file[name] for name in file.files}


def _join(position: int, parts: list[str], texts: list[bytes]) -> Texts:
  ends = np.cumsum([len(text) for text in texts])
  return Texts(position, np.array(parts), b''.join(texts), ends)


def _key(texts: Texts, tokenizer: str) -> str:
  """Of all that decides what a shard holds."""
  names = json.dumps([tokenizer, texts.parts.tolist(), texts.ends.tolist()])
  digest = hashlib.sha256(names.encode())
  digest.update(texts.data)
  return digest.hexdigest()

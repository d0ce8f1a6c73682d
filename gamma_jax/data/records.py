"""Documents as tf.train.Example messages, the records that TFDS reads.

TFDS's own way makes an object of each token, which takes as long as encoding
the text. Here the tokens of many documents become bytes by array operations, in
the format of protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def varints(values: np.ndarray) -> tuple[bytes, np.ndarray]:
  """The bytes of `values` (integers in [0, 2^63), [n]), and where each ends."""
  values = values.astype(np.uint64)
  sizes = np.ones(len(values), np.int64)
  for bits in range(7, 63, 7):
    if not (longer := values >> np.uint64(bits) > 0).any():
      break
    sizes += longer
  ends = np.cumsum(sizes)
  out = np.empty(sizes.sum(), np.uint8)
  for place in range(sizes.max(initial=0)):
    here = sizes > place
    sevens = values[here] >> np.uint64(7 * place) & np.uint64(127)
    more = (sizes[here] > place + 1).astype(np.uint8) << 7
    out[(ends - sizes)[here] + place] = sevens.astype(np.uint8) | more
  return out.tobytes(), ends


def serialize(
  parts: Iterable[str],
  ids: np.ndarray,
  sizes: np.ndarray,
  tokens: np.ndarray,
  ends: np.ndarray,
) -> list[bytes]:
  """A message for each of n documents: 'bytes', 'id', 'source' and 'tokens'.

  Args:
    parts: 'source' of each.
    ids, sizes: 'id' and 'bytes' of each, int64 [n].
    tokens: of all documents end to end.
    ends: where each ends in `tokens`, int64 [n].
  """
  packed, places = varints(tokens)
  # Where the bytes of a document end: a document may be empty.
  places = np.append(0, places)[ends].tolist()
  messages, start = [], 0
  for part, document, size, end in zip(
    parts, ids.tolist(), sizes.tolist(), places, strict=True
  ):
    features = (
      _feature(b'bytes', 3, _varint(size))
      + _feature(b'id', 3, _varint(document))
      + _feature(b'source', 1, part.encode())
      + _feature(b'tokens', 3, packed[start:end])
    )
    messages.append(_field(1, features))
    start = end
  return messages


def _feature(name: bytes, kind: int, values: bytes) -> bytes:
  """An entry of the map; `kind` is 1 for a text, 3 for packed integers."""
  if values:  # protobuf leaves out a list of no numbers
    values = _field(1, values)
  return _field(1, _field(1, name) + _field(2, _field(kind, values)))


def _field(number: int, content: bytes) -> bytes:
  return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
  out = bytearray()
  while value > 127:
    out.append(value & 127 | 128)
    value >>= 7
  out.append(value)
  return bytes(out)

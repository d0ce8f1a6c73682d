"""Tokenizer files that other projects wrote: Hugging Face, sentencepiece.

Each has an end-of-text id of its own here, after all ids of the file, so that
no text can encode to it. `exact` says whether every text comes back as it was:
byte-level BPE without a normalizer does; sentencepiece folds characters and
spaces as its file says, and what a vocabulary lacks is lost.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gamma_jax import errors

_BYTE = re.compile(r'<0x([0-9A-F]{2})>')
_SPACE = '\u2581'  # sentencepiece's


class Foreign:
  """What both have; the attributes are those of tokenizer.Tokenizer."""

  exact = False

  def __init__(self, data: bytes, pieces: list[bytes]):
    """`pieces` holds the bytes of each id, b'' for specials."""
    self._pieces = pieces
    self.eot_id = len(pieces)
    self.vocab_size = len(pieces) + 1
    self.dtype = np.min_scalar_type(self.vocab_size - 1)
    self.token_bytes = np.array([*map(len, pieces), 0], np.int32)
    self.fingerprint = hashlib.sha256(data).hexdigest()[:16]

  def encode(self, text: str | bytes) -> np.ndarray:
    """Returns ids [n].

    Raises:
      ConfigError: bytes that are not UTF-8, which these tokenizers cannot hold.
    """
    try:
      text = text.decode() if isinstance(text, bytes) else text
      text.encode()
    except UnicodeError as error:
      raise errors.ConfigError(
        'data.tokenizer: the text holds bytes that are not UTF-8, which this'
        ' tokenizer cannot encode; use bytes or a BPE of train-tokenizer'
      ) from error
    return np.array(self._ids(text), self.dtype)

  def _ids(self, text: str) -> list[int]:
    raise NotImplementedError

  def decode(self, ids: Iterable[int]) -> bytes:
    """Returns the bytes of `ids`; specials decode to nothing."""
    return b''.join(self._pieces[i] for i in map(int, ids) if i != self.eot_id)


class HuggingFace(Foreign):
  """A `tokenizer.json`, run by the tokenizers library."""

  def __init__(self, path: Path):
    """Raises ValueError when the file is none."""
    data = path.read_bytes()
    library = _need('tokenizers')
    try:
      self._model = library.Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises no class of its own
      raise ValueError(str(error)) from error
    self._model.no_truncation()
    self._model.no_padding()
    # '<|endoftext|>' in a text is text.
    self._model.encode_special_tokens = True
    tree = json.loads(data)
    level = 'ByteLevel' in _kinds(tree.get('decoder'))
    special = {t['id'] for t in tree.get('added_tokens', ()) if t['special']}
    vocab = self._model.get_vocab(with_added_tokens=True)
    pieces = [b''] * (max(vocab.values()) + 1)
    to_byte = _byte_level() if level else {}
    added = {t['id'] for t in tree.get('added_tokens', ())}
    for token, i in vocab.items():
      if i in special:
        continue
      if level and i not in added:
        pieces[i] = bytes(to_byte[char] for char in token)
      else:
        pieces[i] = _piece(token)
    super().__init__(data, pieces)
    prefix = any(
      'add_prefix_space": true' in json.dumps(tree.get(key))
      for key in ('pre_tokenizer', 'normalizer')
    )
    alphabet = {piece for piece in pieces if len(piece) == 1}
    self.exact = (
      level
      and not prefix
      and tree.get('normalizer') is None
      and len(alphabet) == 256
    )

  def _ids(self, text: str) -> list[int]:
    return self._model.encode(text, add_special_tokens=False).ids


class SentencePiece(Foreign):
  """A `.model` of sentencepiece."""

  def __init__(self, path: Path):
    """Raises ValueError when the file is none."""
    library = _need('sentencepiece')
    data = path.read_bytes()
    try:
      self._model = library.SentencePieceProcessor(model_proto=data)
      size = self._model.vocab_size()
    except (RuntimeError, OSError) as error:
      raise ValueError(str(error)) from error
    if not size:
      raise ValueError('no pieces')
    pieces = []
    for i in range(size):
      hidden = self._model.is_control(i) or self._model.is_unknown(i)
      pieces.append(b'' if hidden else _piece(self._model.id_to_piece(i)))
    super().__init__(data, pieces)

  def _ids(self, text: str) -> list[int]:
    return self._model.encode(text, out_type=int)


def _need(module: str) -> ModuleType:
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise errors.ConfigError(
      f"this tokenizer file needs {module}: pip install 'gamma_jax[tokenizer]'"
    ) from error


def _piece(token: str) -> bytes:
  """The bytes of a piece: '<0x0A>' is a byte, a low line a space."""
  if found := _BYTE.fullmatch(token):
    return bytes([int(found[1], 16)])
  return token.replace(_SPACE, ' ').encode()


def _kinds(part: Any) -> set[str]:
  """Names of a part of a tokenizer.json and of what it is made of."""
  if isinstance(part, dict):
    return {part.get('type', '')}.union(*map(_kinds, part.values()))
  return set().union(*map(_kinds, part)) if isinstance(part, list) else set()


def _byte_level() -> dict[str, int]:
  """How byte-level vocabularies write bytes: printable ones as themselves."""
  shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
  table = {chr(byte): byte for byte in shown}
  hidden = (byte for byte in range(256) if byte not in shown)
  return table | {chr(256 + i): byte for i, byte in enumerate(hidden)}

"""Byte-level BPE, read from a JSON file and run by tiktoken.

The file holds `{"pattern": str, "ranks": [base64 bytes of id 0, 1, ...],
"special": ["<|endoftext|>"]}`; specials take the ids after the ranks. Nothing
is ever downloaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken

from gamma_jax import errors
from gamma_jax.data import foreign

EOT = '<|endoftext|>'
SAMPLE = Path(__file__).parent / 'sample'
# GPT-4's: words with their space, runs of at most three digits.
PATTERN = (
  r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
  r'| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+'
)
# The pattern backtracks inside one string: longer text goes in slices.
MAX_CHARS = 100_000
_RUNS = re.compile('[\udc80-\udcff]+|[^\udc80-\udcff]+')


class Tokenizer:
  """Text to ids and back, exactly, for any bytes.

  Attributes:
    pattern: regular expression that cuts text into pieces.
    ranks: bytes of id 0, 1, ...; specials follow.
    exact: every text comes back as it was.
    vocab_size: number of ids, specials included.
    eot_id: id of the one special token; text never encodes to it.
    fingerprint: 16 hex digits of everything that decides the ids.
    dtype: smallest unsigned dtype that holds every id.
    token_bytes: int32 [V], length in bytes of each id; 0 for specials.
  """

  exact = True

  def __init__(self, pattern: str, ranks: list[bytes]):
    if len(set(ranks)) != len(ranks):
      raise ValueError('a token is there twice')
    self.pattern, self.ranks = pattern, ranks
    self.eot_id = len(ranks)
    self.vocab_size = len(ranks) + 1
    self.dtype = np.min_scalar_type(self.vocab_size - 1)
    self.token_bytes = np.array([*map(len, ranks), 0], np.int32)
    self.fingerprint = hashlib.sha256(_to_json(pattern, ranks)).hexdigest()[:16]
    self._encoding = tiktoken.Encoding(
      'gamma_jax',
      pat_str=pattern,
      mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
      special_tokens={EOT: self.eot_id},
    )
    self._byte_ids = [ranks.index(bytes([b])) for b in range(256)]

  def encode(self, text: str | bytes) -> np.ndarray:
    """Returns ids [n]. A literal '<|endoftext|>' is ordinary text."""
    if isinstance(text, str):
      # Half a surrogate pair (JSON may hold one) becomes invalid UTF-8.
      text = text.encode('utf-8', 'surrogatepass')
    # Bytes that are not UTF-8 decode to lone surrogates, one each.
    ids: list[int] = []
    for run in _RUNS.findall(text.decode('utf-8', 'surrogateescape')):
      if '\udc80' <= run[0] <= '\udcff':
        ids += [self._byte_ids[ord(char) - 0xDC00] for char in run]
      else:
        ids += self._encode_valid(run)
    return np.array(ids, self.dtype)

  def _encode_valid(self, text: str) -> list[int]:
    ids = []
    for start in range(0, len(text), MAX_CHARS):
      ids += self._encoding.encode_ordinary(text[start : start + MAX_CHARS])
    return ids

  def decode(self, ids: Iterable[int]) -> bytes:
    """Returns the bytes of `ids`; specials decode to nothing."""
    return b''.join(self.ranks[i] for i in map(int, ids) if i != self.eot_id)


def load_tokenizer(name_or_path: str) -> Tokenizer | foreign.Foreign:
  """Returns 'bytes', a name in the sample ('bpe4k'), or that of a file.

  What a file is, its content says: one of `train_bpe`, a Hugging Face
  tokenizer.json, a list of ranks as tiktoken reads it (which holds no pattern:
  PATTERN is used) or a sentencepiece model.

  Raises:
    ConfigError: no such file, or not a tokenizer.
  """
  if name_or_path == 'bytes':
    return Tokenizer(PATTERN, [bytes([b]) for b in range(256)])
  path = SAMPLE / f'{name_or_path}.json'
  if not path.exists():
    path = Path(name_or_path).expanduser()
  if not path.is_file():
    raise errors.ConfigError(
      f'data.tokenizer: no tokenizer {name_or_path!r}; give bpe4k, bytes or'
      ' the path of a tokenizer file'
    )
  try:
    return _read(path)
  except (ValueError, KeyError, TypeError) as error:
    raise errors.ConfigError(
      f'data.tokenizer: {path} is not a tokenizer file ({error!r})'
    ) from error


def _read(path: Path) -> Tokenizer | foreign.Foreign:
  data = path.read_bytes()
  if data.lstrip()[:1] in (b'{', b'['):
    tree = json.loads(data)
    if 'model' in tree:
      return foreign.HuggingFace(path)
    ranks = [base64.b64decode(token) for token in tree['ranks']]
    if tree['special'] != [EOT]:
      raise ValueError(f'special tokens must be {[EOT]}')
    return Tokenizer(tree['pattern'], ranks)
  if not re.match(rb'[A-Za-z0-9+/]+=* \d+\r?\n', data):
    return foreign.SentencePiece(path)
  pairs = [line.split() for line in data.splitlines() if line]
  if [int(rank) for _, rank in pairs] != list(range(len(pairs))):
    raise ValueError('ranks must be 0, 1, 2, ...')
  return Tokenizer(PATTERN, [base64.b64decode(token) for token, _ in pairs])


def train_bpe(
  texts: Iterable[str], vocab_size: int, path: str | Path
) -> Tokenizer:
  """Trains a BPE of exactly `vocab_size` ids on `texts`, saves and returns it.

  Raises:
    ConfigError: fewer than 257 ids asked for, too little text for so many, or
      rustbpe is not installed.
  """
  if vocab_size < 257:
    raise errors.ConfigError(f'vocab_size {vocab_size}: the least is 257')
  try:
    import rustbpe  # an optional extra: only training needs it
  except ImportError as error:
    raise errors.ConfigError(
      "training a tokenizer needs rustbpe: pip install 'gamma_jax[tokenizer]'"
    ) from error
  trainer = rustbpe.Tokenizer()
  trainer.train_from_iterator(iter(texts), vocab_size - 1, pattern=PATTERN)
  ranks = [bytes(token) for token, _ in trainer.get_mergeable_ranks()]
  if len(ranks) + 1 != vocab_size:
    raise errors.ConfigError(
      f'too little text for {vocab_size} ids: it gives {len(ranks) + 1}'
    )
  Path(path).write_bytes(_to_json(PATTERN, ranks))
  return Tokenizer(PATTERN, ranks)


def _to_json(pattern: str, ranks: list[bytes]) -> bytes:
  tokens = [base64.b64encode(token).decode() for token in ranks]
  data = {'pattern': pattern, 'ranks': tokens, 'special': [EOT]}
  return json.dumps(data, indent=0).encode()

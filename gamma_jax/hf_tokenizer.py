"""Our byte-level BPE as the tokenizer.json that Hugging Face reads.

Both sides cut with one pattern and join the pair whose join has the lowest
rank. A text starts with the end-of-text token, as in training. Two things
differ: a literal '<|endoftext|>' in a text becomes the special token there,
and text that is not UTF-8 can only be encoded here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gamma_jax.data import tokenizer as tokenizer_lib


def tokenizer_json(pattern: str, ranks: Sequence[bytes]) -> dict[str, Any]:
  """Content of tokenizer.json.

  Args:
    pattern: regular expression that cuts text into pieces.
    ranks: bytes of id 0, 1, ...; the special token follows.
  """
  eot, eot_id = tokenizer_lib.EOT, len(ranks)
  byte_level = {
    'type': 'ByteLevel',
    'add_prefix_space': False,
    'trim_offsets': False,
    'use_regex': False,
  }
  split = {
    'type': 'Split',
    'pattern': {'Regex': pattern},
    'behavior': 'Isolated',
    'invert': False,
  }
  special = {'SpecialToken': {'id': eot, 'type_id': 0}}
  one = {'Sequence': {'id': 'A', 'type_id': 0}}
  two = {'Sequence': {'id': 'B', 'type_id': 0}}
  return {
    'version': '1.0',
    'truncation': None,
    'padding': None,
    'added_tokens': [
      {
        'id': eot_id,
        'content': eot,
        'single_word': False,
        'lstrip': False,
        'rstrip': False,
        'normalized': False,
        'special': True,
      }
    ],
    'normalizer': None,
    'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': [split, byte_level]},
    'post_processor': {
      'type': 'TemplateProcessing',
      'single': [special, one],
      'pair': [special, one, two],
      'special_tokens': {eot: {'id': eot, 'ids': [eot_id], 'tokens': [eot]}},
    },
    'decoder': byte_level,
    'model': {
      'type': 'BPE',
      'dropout': None,
      'unk_token': None,
      'continuing_subword_prefix': None,
      'end_of_word_suffix': None,
      'fuse_unk': False,
      'byte_fallback': False,
      'ignore_merges': True,
      'vocab': {_printable(token): i for i, token in enumerate(ranks)},
      'merges': _merges(ranks),
    },
  }


def tokenizer_config_json(seq_len: int) -> dict[str, Any]:
  """Content of tokenizer_config.json."""
  return {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'bos_token': tokenizer_lib.EOT,
    'eos_token': tokenizer_lib.EOT,
    'pad_token': tokenizer_lib.EOT,
    'clean_up_tokenization_spaces': False,
    'model_max_length': seq_len,
  }


def _merges(ranks: Sequence[bytes]) -> list[list[str]]:
  """Every pair that joins to a token, by the rank of that token.

  A trained BPE met one pair for each token; ours joins any pair, so all are
  listed.
  """
  rank_of = {token: rank for rank, token in enumerate(ranks)}
  merges = []
  for token in ranks:
    pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
    pairs = [p for p in pairs if p[0] in rank_of and p[1] in rank_of]
    pairs.sort(key=lambda p: (rank_of[p[0]], rank_of[p[1]]))
    merges += [[_printable(a), _printable(b)] for a, b in pairs]
  return merges


def _byte_alphabet() -> dict[int, str]:
  """The ByteLevel alphabet: visible Latin-1 as it is, the rest from U+0100."""
  visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
  hidden = [b for b in range(256) if b not in visible]
  alphabet = {b: chr(b) for b in visible}
  return alphabet | {b: chr(256 + i) for i, b in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


def _printable(token: bytes) -> str:
  return ''.join(_ALPHABET[b] for b in token)

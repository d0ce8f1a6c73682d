"""Tokens of a byte-level tokenizer as safe, readable HTML.

A token may hold a part of a character only. Bytes that do not finish one are
shown in hexadecimal, and the character where its last byte comes, so that text
in any script reads as it is and every token still has its own mark.
"""

from __future__ import annotations

import codecs
import html
import unicodedata
from collections.abc import Sequence

END = '⟨end⟩'
# Ends of the scale. Blue and orange stay apart for all common kinds of colour
# blindness, and black letters are legible on both.
A_BETTER, B_BETTER = (67, 147, 195), (244, 162, 76)


def shown(pieces: Sequence[bytes | None]) -> list[str]:
  """HTML of each token of a text.

  Args:
    pieces: bytes of each token; None is the end of a document.
  """
  decoder = _decoder()
  out = []
  for piece in pieces:
    if piece is None:
      decoder = _decoder()
      out.append(_mark(END))
      continue
    shown_before = len(_pending(decoder))
    text = decoder.decode(piece)
    # Bytes that no character came of; those of earlier tokens are shown there.
    for char in text[:shown_before]:
      if not _is_byte(char):
        break
      text = text[1:]
    left = _pending(decoder)
    left = left[max(len(left) - len(piece), 0) :]
    out.append(''.join(map(_char, text)) + ''.join(map(_byte, left)))
  return out


def plain(piece: bytes | None) -> str:
  """One token for a tooltip; quoted, with escapes; not yet HTML."""
  if piece is None:
    return 'end of document'
  text = piece.decode('utf-8', 'backslashreplace')
  return '“' + ''.join(map(_escape, text)) + '”'


def colour(delta: float) -> str:
  """Background of a token: white at 0, `A_BETTER` at 1, `B_BETTER` at -1."""
  end = A_BETTER if delta > 0 else B_BETTER
  share = min(abs(delta), 1.0)
  return '#' + ''.join(f'{round(255 + share * (c - 255)):02x}' for c in end)


def _decoder() -> codecs.IncrementalDecoder:
  return codecs.getincrementaldecoder('utf-8')('surrogateescape')


def _pending(decoder: codecs.IncrementalDecoder) -> bytes:
  return decoder.getstate()[0]


def _is_byte(char: str) -> bool:
  return '\udc80' <= char <= '\udcff'


def _char(char: str) -> str:
  if char == '\n':
    return _mark('⏎') + '\n'
  if _is_byte(char):
    return _byte(ord(char) - 0xDC00)
  text = _escape(char)
  return html.escape(text) if text == char else _mark(text)


def _escape(char: str) -> str:
  """`char`, or its code where it would not show or change the order of text."""
  if char.isprintable() or unicodedata.category(char) == 'Zs':
    return char
  return {'\n': '⏎', '\t': '⇥'}.get(char, f'U+{ord(char):04X}')


def _byte(value: int) -> str:
  return _mark(f'{value:02X}')


def _mark(text: str) -> str:
  return f'<i>{html.escape(text)}</i>'

"""Plain text from the packages of offline_bi: pages, manuals, verse, entries.

Every function takes the folder of an unpacked package and yields documents in
a fixed order.
"""

from __future__ import annotations

import gzip
import html
import html.parser
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

_BLOCKS = frozenset(
  'p li dd dt h1 h2 h3 h4 h5 h6 td th pre blockquote div tr br'.split()
)
_SKIPPED = frozenset('title script style nav header footer'.split())
_LEAST = 40  # characters; less is a heading or a name

Reader = Callable[[Path], Iterator[str]]


def pages(pattern: str) -> Reader:
  """HTML files, a document a page."""

  def read(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob(pattern)):
      if path.is_file():
        yield from _long(_plain(path.read_text(errors='replace')))

  return read


def files(pattern: str, but: tuple[str, ...] = ()) -> Reader:
  """Plain or gzipped files, a document each; `but` are parts of paths."""

  def read(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob(pattern)):
      if path.is_file() and not any(part in str(path) for part in but):
        yield from _long(_text(path))

  return read


def manuals(pattern: str) -> Reader:
  """Manual pages, without the marks of roff."""

  def read(folder: Path) -> Iterator[str]:
    for text in files(pattern)(folder):
      lines = (
        x for x in text.splitlines() if not x.startswith(('.\\"', '\'\\"'))
      )
      plain = (
        re.sub(r'\\f[A-Z]|\\[&|]', '', re.sub(r'^\.[A-Za-z]+ ?', '', line))
        for line in lines
      )
      yield from _long('\n'.join(plain).replace('\\-', '-'))

  return read


def entries(pattern: str) -> Reader:
  """A dictionary of dictd: an entry begins at a line that is not indented."""

  def read(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob(pattern)):
      for entry in re.split(r'\n(?=\S)', _text(path)):
        yield from _long(entry)

  return read


def poems(*patterns: str) -> Reader:
  """Verse and classics as JSON lists of {title, author, paragraphs}."""

  def read(folder: Path) -> Iterator[str]:
    paths = {p for pattern in patterns for p in folder.glob(pattern)}
    for path in sorted(paths):
      found = json.loads(path.read_text())
      for poem in found if isinstance(found, list) else []:
        if isinstance(poem, dict):
          yield from _poem(poem)

  return read


def factbook(folder: Path) -> Iterator[str]:
  """A country a document, 'field: text' a line."""

  def walk(tree: dict, above: str) -> Iterator[str]:
    for key, value in tree.items():
      if isinstance(value, dict):
        yield from walk(value, above if key == 'text' else f'{above}{key}: ')
      elif isinstance(value, str) and value:
        yield (above if key == 'text' else f'{above}{key}: ') + value

  for path in sorted((folder / 'package').glob('*/*.json')):
    country = json.loads(path.read_text())
    if isinstance(country, dict) and 'Introduction' in country:
      lines = (
        re.sub('<[^>]+>', ' ', html.unescape(x)) for x in walk(country, '')
      )
      yield '\n'.join(re.sub(r'\s+', ' ', line).strip() for line in lines)


def king_james(folder: Path) -> Iterator[str]:
  """A chapter a document, a verse a line; runs the program of the package."""
  text = subprocess.run(
    [folder / 'usr/bin/bible', '-p', f'{folder}/usr/lib/', 'gen1:1-rev22:21'],
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  for chapter in re.split(
    r'^(?=[1-3]? ?[A-Z][A-Za-z ]+ \d+\n)', text, flags=re.M
  ):
    heading, _, verses = chapter.partition('\n')
    lines = re.split(r'^ +\d+ ', verses, flags=re.M)
    flat = (re.sub(r'\s+', ' ', line).strip() for line in lines)
    yield from _long('\n'.join([heading.strip(), *(x for x in flat if x)]))


def _poem(poem: dict) -> Iterator[str]:
  title = next(
    (poem[k] for k in ('title', 'rhythmic', 'chapter') if k in poem), ''
  )
  lines = next(
    (poem[k] for k in ('paragraphs', 'content', 'para') if poem.get(k)), []
  )
  if isinstance(lines, str):
    lines = [lines]
  if lines and all(isinstance(line, str) for line in lines):
    yield (
      f'《{title}》 {poem.get("author", "")}'.strip() + '\n' + '\n'.join(lines)
    )


def _text(path: Path) -> str:
  data = path.read_bytes()
  if data[:2] == b'\x1f\x8b':
    data = gzip.decompress(data)
  return data.decode(errors='replace')


def _long(text: str) -> Iterator[str]:
  text = text.strip()
  if len(text) >= _LEAST:
    yield text


def _plain(page: str) -> str:
  parser = _Page()
  parser.feed(page)
  parser.close()
  lines = (line.strip() for line in ''.join(parser.parts).split('\n'))
  return '\n'.join(line for line in lines if line)


class _Page(html.parser.HTMLParser):
  """Collects the text of a page, a block a line."""

  def __init__(self):
    super().__init__()
    self.parts: list[str] = []
    self._skipped = self._as_is = 0

  def handle_starttag(self, tag: str, attrs: list) -> None:
    del attrs
    self._skipped += tag in _SKIPPED
    self._as_is += tag == 'pre'
    if tag in _BLOCKS:
      self.parts.append('\n')

  def handle_endtag(self, tag: str) -> None:
    self._skipped -= tag in _SKIPPED and self._skipped > 0
    self._as_is -= tag == 'pre' and self._as_is > 0
    if tag in _BLOCKS:
      self.parts.append('\n')

  def handle_data(self, data: str) -> None:
    if not self._skipped:
      self.parts.append(data if self._as_is else re.sub(r'\s+', ' ', data))

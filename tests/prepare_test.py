"""A corpus in shards: who makes them, and when, changes nothing."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from hypothesis import given
from hypothesis import strategies as st
from tensorflow_datasets.core import example_serializer

from gamma_jax import errors
from gamma_jax.config import DataConfig
from gamma_jax.data import (
  hub,
  pipeline,
  prepare,
  records,
  shards,
  sources,
  tokenizer,
  workers,
)

SIZE = 8000  # bytes of text a shard
SHARDS = 12


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
  monkeypatch.setattr(shards, 'SIZE', SIZE)


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  folder = tmp_path_factory.mktemp('corpus')
  rng = np.random.default_rng(0)
  for part, letters in (('en', 'abc  de\n'), ('zh', '學而時習之')):
    with (folder / f'{part}.jsonl').open('w') as out:
      for length in rng.integers(1, 300, size=150):
        text = ''.join(rng.choice(list(letters), length))
        out.write(json.dumps({'text': text}) + '\n')
  return f'jsonl:{folder}/*.jsonl'


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
  """What a build gives that needs no shard: in one piece, in memory."""
  data = DataConfig(corpus, dir=str(tmp_path_factory.mktemp('whole')))
  return contents(prepare.prepare(data))


def contents(folder):
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in folder.rglob('*')
    if path.is_file()
  }


@pytest.mark.parametrize('processes', [1, 2])
def test_any_number_of_processes_gives_the_same_files(
  corpus, whole, processes, tmp_path, monkeypatch
):
  made = []
  rmtree = prepare.shutil.rmtree

  def look(path, **kwargs):
    made.extend(path.glob('*.shard'))
    rmtree(path, **kwargs)

  monkeypatch.setattr(prepare.shutil, 'rmtree', look)
  data = DataConfig(corpus, dir=str(tmp_path))
  folder = prepare.prepare(data, processes)
  assert contents(folder) == whole
  assert len(made) == SHARDS
  assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]


KILLED = """
import os, signal, sys
from gamma_jax.config import DataConfig
from gamma_jax.data import prepare, shards, workers
shards.SIZE, next_, done = int(sys.argv[3]), workers._next, []
def dies(*args):
  done.append(next_(*args))
  if len(done) == 3:
    os.kill(os.getpid(), signal.SIGKILL)
  return done[-1]
workers._next = dies
prepare.prepare(DataConfig(sys.argv[1], dir=sys.argv[2]), 2)
"""


def test_killed_then_made_again(corpus, whole, tmp_path, capfd, monkeypatch):
  command = [sys.executable, '-c', KILLED, corpus, tmp_path, str(SIZE)]
  killed = subprocess.run(command, stderr=subprocess.PIPE, timeout=60)
  # Its workers hold the same stderr, so here they have ended too.
  assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
  assert b'Traceback' not in killed.stderr
  found = sorted(tmp_path.glob('.jsonl-*.shards/*.shard'))
  assert 3 <= len(found) < SHARDS
  assert not list(tmp_path.glob('jsonl-*/'))  # nothing that looks complete

  damaged = bytearray(found[0].read_bytes())
  damaged[len(damaged) // 2] ^= 1
  found[0].write_bytes(damaged)
  encoded = []
  encode = shards.encode
  monkeypatch.setattr(
    shards, 'encode', lambda *args: encoded.append(1) or encode(*args)
  )
  folder = prepare.prepare(DataConfig(corpus, dir=str(tmp_path)), 1)
  assert len(encoded) == SHARDS - len(found) + 1
  assert (
    f'{len(found) - 1} of {SHARDS} shards were there' in capfd.readouterr()[1]
  )
  assert contents(folder) == whole
  assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]


def test_cut_keeps_every_document_in_its_order():
  documents = [hub.Document('a', 'x' * n, n) for n in (1, 7999, 5, 9000, 3)]
  documents.append(hub.Document('b', b'\xff', 10))
  pieces = list(shards.cut(documents))
  assert [piece.position for piece in pieces] == [7999, 9000, 10]
  found = [pair for p in pieces for pair in zip(p.parts, p, strict=True)]
  want = [(part, text) for part, text, _ in documents]
  assert found == [(p, t if p == 'b' else t.encode()) for p, t in want]
  assert not list(shards.cut([]))


def test_a_file_is_used_for_its_own_text_and_tokenizer_alone(tmp_path):
  path = tmp_path / 'x.shard'
  coder, other = map(tokenizer.load_tokenizer, ('bpe4k', 'bytes'))
  documents = [hub.Document('a', f'text {i} ' * i, i) for i in range(1, 9)]
  (texts,) = shards.cut(documents)
  assert shards.make(texts, path, coder) and not shards.make(texts, path, coder)
  read = shards.read(path)
  assert read.texts.position == 8
  for (part, text, id_, tokens, _), document in zip(
    read.documents(), documents, strict=True
  ):
    assert (part, text) == ('a', document.text.encode())
    assert id_ == shards.document_id(text)
    assert tokens.dtype == coder.dtype and coder.decode(tokens) == text
  parts = np.array(['b', *texts.parts[1:]])
  assert shards.make(dataclasses.replace(texts, parts=parts), path, coder)
  assert shards.make(texts, path, other)
  assert shards.read(path).tokens.dtype == np.uint16
  assert os.listdir(tmp_path) == ['x.shard']


@given(st.lists(st.integers(0, 2**63 - 1), max_size=30))
def test_varints(values):
  data, ends = records.varints(np.array(values, np.int64))
  found, start = [], 0
  for end in ends:
    sevens = [byte & 127 for byte in data[start:end]]
    assert all(byte >> 7 for byte in data[start : end - 1])
    assert data[end - 1] < 128
    found.append(sum(seven << 7 * i for i, seven in enumerate(sevens)))
    start = end
  assert found == values


def test_records_are_those_of_tfds():
  features = tfds.features.FeaturesDict(
    {
      'tokens': tfds.features.Tensor(shape=(None,), dtype=np.uint32),
      'source': tfds.features.Text(),
      'id': np.int64,
      'bytes': np.int64,
    }
  )
  rng = np.random.default_rng(0)
  tokens = [
    rng.integers(0, 2**30, n, np.uint32) >> 7 * i
    for i, n in enumerate((3, 200, 0, 9))
  ]
  want = [
    {'tokens': t, 'source': part, 'id': id_, 'bytes': size}
    for t, part, id_, size in zip(
      tokens,
      ('en', '中' * 50, 'a', 'b'),
      (0, 2**63 - 1, 7, 128),
      (1, 127, 300, 0),
      strict=True,
    )
  ]
  made = records.serialize(
    [one['source'] for one in want],
    np.array([one['id'] for one in want]),
    np.array([one['bytes'] for one in want]),
    np.concatenate(tokens),
    np.cumsum([len(t) for t in tokens]),
  )
  theirs = example_serializer.ExampleSerializer(features.get_serialized_info())
  for record, one in zip(made, want, strict=True):
    message = theirs.get_tf_example(features.encode_example(one))
    assert type(message).FromString(record) == message
    assert len(record) == message.ByteSize()
    found = features.deserialize_example_np(record)
    assert found['tokens'].tolist() == one['tokens'].tolist()
    assert found['source'].decode() == one['source']


@pytest.mark.parametrize('damage', [lambda b: b[:-1], lambda b: b'', bytes])
def test_damage_is_an_error_when_read(damage, tmp_path):
  path = tmp_path / 'x.shard'
  (texts,) = shards.cut([hub.Document('a', 'some text', 1)])
  shards.make(texts, path, tokenizer.load_tokenizer('bytes'))
  data = bytearray(path.read_bytes())
  data[100] ^= 1
  path.write_bytes(damage(data))
  with pytest.raises(OSError, match='x.shard is damaged'):
    shards.read(path)


def test_bad_input_after_some_shards_leaves_nothing(corpus, tmp_path):
  path = tmp_path / 'bad.jsonl'
  line = json.dumps({'text': 'a' * SIZE}) + '\n'
  path.write_text(5 * line + '{}\n')
  data = DataConfig(f'jsonl:{path}', dir=str(tmp_path))
  with pytest.raises(errors.ConfigError, match='bad.jsonl:6 is not'):
    prepare.prepare(data, 1)
  assert not [path for path in tmp_path.iterdir() if path.is_dir()]
  with pytest.raises(errors.ConfigError, match='processes: 0'):
    prepare.prepare(data, 0)


def test_a_worker_that_dies_is_one_line(corpus, tmp_path, monkeypatch):
  monkeypatch.setattr(workers.sys, 'executable', '/bin/false')
  data = DataConfig(corpus, dir=str(tmp_path))
  with pytest.raises(errors.ConfigError, match='a worker ended with') as caught:
    prepare.prepare(data, 2)
  assert '\n' not in str(caught.value)


def test_an_error_in_a_worker_is_that_of_the_parent(tmp_path):
  coder = tokenizer.load_tokenizer('bytes')
  coder.fingerprint = 'another'
  texts = shards.cut([hub.Document('a', 'some text', 1)])
  with pytest.raises(errors.ConfigError, match='bytes has just changed'):
    workers.make_all(texts, tmp_path, coder, 'bytes', 2, print)


def test_sources_joined(corpus, tmp_path):
  for part in ('c++', 'zh'):
    (tmp_path / part).mkdir()
    (tmp_path / part / 'x.txt').write_text(f'text of {part}')
  text = f'text:{tmp_path}/*/*.txt'
  joined = sources.open_source(f'{corpus}+{text}', None)
  assert joined.parts == ('en', '1:zh', 'c++', '2:zh')
  first, second = (sources.open_source(s, None) for s in (corpus, text))
  documents = list(joined.documents())
  assert [d.text for d in documents] == [
    d.text for source in (first, second) for d in source.documents()
  ]
  assert [d.part for d in documents[-2:]] == ['c++', '2:zh']
  assert documents[-1].position == joined.size
  # A '+' of a path stays one, and so does the source.
  plain = sources.open_source(f'text:{tmp_path}/c++/*.txt', None)
  assert [d.text for d in plain.documents()] == [b'text of c++']
  other = sources.open_source(f'{text}+{corpus}', None)
  assert other.identity != joined.identity
  with pytest.raises(errors.ConfigError, match='no file matches /none'):
    sources.open_source(f'{text}+jsonl:/none', None)


def test_a_mixture_weighs_parts_of_two_sources(corpus, tmp_path, monkeypatch):
  monkeypatch.setattr(shards, 'SIZE', 10**6)  # one: this is not about them
  (tmp_path / 'x.txt').write_text('text of another source')
  source = f'{corpus}+text:{tmp_path}/x.txt'
  mixture = (('zh', 1.0), (tmp_path.name, 1.0))
  data = DataConfig(source, 'bytes', mixture, str(tmp_path), 0.0)
  batch = next(pipeline.train_iterator(data, seed=0, batch_size=9, seq_len=999))
  seen = bytes(t for t in batch['tokens'].ravel().tolist() if t < 256)
  assert set(seen) == set('學而時習之text of another source'.encode())

import collections
import dataclasses
import gzip
import hashlib
import json
import os
import subprocess
import sys

import grain
import numpy as np
import pytest

from gamma_jax import errors
from gamma_jax.config import DataConfig
from gamma_jax.data import builder as builder_lib
from gamma_jax.data import order, pipeline, shards
from gamma_jax.data import prepare as prepare_lib
from gamma_jax.data import tokenizer as tokenizer_lib

EOT = 256  # of the bytes tokenizer


@pytest.fixture(scope='session')
def sample(tmp_path_factory):
  return DataConfig(dir=str(tmp_path_factory.mktemp('sample')))


@pytest.fixture(scope='session')
def corpus(tmp_path_factory):
  """A config on two small parts, and its documents by split and part.

  Every document is different, and lengths go through all that a window of 16
  can meet.
  """
  folder = tmp_path_factory.mktemp('corpus')
  rng = np.random.default_rng(0)

  def text(alphabet, length):
    return ''.join(rng.choice(list(alphabet), length))

  texts = {
    'long': [f'{i} ' + text('abcdef', i % 200) for i in range(150)],
    'short': [f'学{i}' + text('而時習之', i % 40) for i in range(250)],
  }
  for part, documents in texts.items():
    write(folder / f'{part}.jsonl', documents)
  data = DataConfig(
    source=f'jsonl:{folder}/*.jsonl',
    tokenizer='bytes',
    dir=str(folder / 'prepared'),
    heldout_percent=30,
  )
  splits = {'train': {}, 'heldout': {}}
  for part, documents in texts.items():
    for text in documents:
      document = shards.document_id(text.encode())
      split = splits[builder_lib.split_of(document, data.heldout_percent)]
      split.setdefault(part, []).append(text.encode())
  return data, splits


def write(path, documents):
  lines = (json.dumps({'text': text}) for text in documents)
  path.write_text('\n'.join(lines) + '\n\n')
  return path


def digest(batch):
  parts = (
    f'{k}{v.dtype}{v.shape}'.encode() + v.tobytes() for k, v in batch.items()
  )
  return hashlib.sha256(b''.join(parts)).hexdigest()


def take(iterator, n):
  return [digest(next(iterator)) for _ in range(n)]


def train_documents(data, count, **kwargs):
  """The next `count` whole documents that a train iterator gives."""
  kwargs = {'seed': 0, 'batch_size': 1, 'seq_len': 15} | kwargs
  iterator = pipeline.train_iterator(data, **kwargs)
  found, open_ = [], None
  while len(found) < count:
    for token in next(iterator)['tokens'].ravel():
      if token != EOT:
        open_.append(token)
      elif open_ is None:
        open_ = []
      else:
        found.append(bytes(open_))
        open_ = None
  return found[:count]


# --- prepare


def test_counts_of_the_sample(sample):
  folder = prepare_lib.prepare(sample)
  tokenizer = tokenizer_lib.load_tokenizer('bpe4k')
  want = collections.defaultdict(
    lambda: {'documents': 0, 'tokens': 0, 'bytes': 0}
  )
  for part in ('en', 'zh'):
    with gzip.open(tokenizer_lib.SAMPLE / f'{part}.jsonl.gz') as lines:
      for line in lines:
        text = json.loads(line)['text'].encode()
        split = builder_lib.split_of(shards.document_id(text), 5)
        count = want[split, part]
        count['documents'] += 1
        count['tokens'] += len(tokenizer.encode(text))
        count['bytes'] += len(text)
  splits = prepare_lib.read_manifest(folder)['splits']
  assert {(s, p): c for s in splits for p, c in splits[s].items()} == want
  for part in ('en', 'zh'):
    held, train = (splits[s][part]['documents'] for s in ('heldout', 'train'))
    assert 0.03 < held / (held + train) < 0.07, part


def test_sample_is_small():
  files = list(tokenizer_lib.SAMPLE.iterdir())
  assert sum(path.stat().st_size for path in files) < 1_000_000


def test_second_prepare_writes_nothing(corpus):
  data, _ = corpus
  folder = prepare_lib.prepare(data)
  before = {p: p.stat().st_mtime_ns for p in folder.rglob('*')}
  assert prepare_lib.prepare(data) == folder
  assert {p: p.stat().st_mtime_ns for p in folder.rglob('*')} == before


def test_split_is_of_the_text_alone(tmp_path):
  texts = [f'document {i}' for i in range(200)]
  held = []
  for name, documents in (('a', texts), ('b', texts[50:][::-1])):
    path = write(tmp_path / f'{name}.jsonl', documents)
    data = DataConfig(f'jsonl:{path}', 'bytes', (), str(tmp_path), 20)
    batches = pipeline.eval_batches(data, seq_len=64, batch_size=1)
    held.append({bytes(labels[:-1]) for _, _, labels in windows(batches)})
  assert held[1] == held[0] & {text.encode() for text in texts[50:]}
  assert 0.1 < len(held[0]) / len(texts) < 0.3


def test_configs_do_not_share_a_folder(corpus, tmp_path):
  data, _ = corpus
  data = dataclasses.replace(data, dir=str(tmp_path))
  path = write(tmp_path / 'x.jsonl', ['one', 'two', 'three'])
  local = dataclasses.replace(data, source=f'jsonl:{path}')
  folders = [
    prepare_lib.prepare(config)
    for config in (
      data,
      dataclasses.replace(data, heldout_percent=31),
      dataclasses.replace(data, tokenizer='bpe4k'),
      dataclasses.replace(data, source='synthetic'),
      local,
    )
  ]
  write(path, ['one', 'two', 'four!'])
  folders.append(prepare_lib.prepare(local))
  assert len(set(folders)) == 6
  contents = [prepare_lib.read_manifest(f)['content'] for f in folders]
  assert contents[-1] != contents[-2]
  # What does not decide the tokens does not decide the folder.
  other = dataclasses.replace(data, mixture=(('long', 1.0),), seed=3)
  assert prepare_lib.prepare(other) == folders[0]


@pytest.mark.parametrize(
  'change, message',
  [
    ({'source': 'jsonl:/no/such/*.jsonl'}, 'no file matches /no/such'),
    ({'source': 'webtext'}, 'is not sample, synthetic or jsonl'),
    ({'source': 'jsonl:'}, 'is not sample, synthetic or jsonl'),
    ({'tokenizer': 'gpt2'}, 'no tokenizer'),
    ({'heldout_percent': 100.0}, 'not in'),
    ({'dir': '/proc/nowhere'}, 'cannot prepare'),
    ({'source': 'jsonl:{tmp}/bad.jsonl'}, 'bad.jsonl:2 is not a JSON object'),
    ({'source': 'jsonl:{tmp}/empty.jsonl'}, 'no document to train on'),
    ({'source': 'jsonl:{tmp}/plain.jsonl.gz'}, 'cannot prepare'),
  ],
)
def test_bad_input_is_one_line(change, message, tmp_path):
  (tmp_path / 'bad.jsonl').write_text('{"text": "a"}\n["text"]\n')
  (tmp_path / 'empty.jsonl').write_text('{"text": ""}\n')
  (tmp_path / 'plain.jsonl.gz').write_text('{"text": "a"}\n')
  change = {
    k: v.replace('{tmp}', str(tmp_path)) if isinstance(v, str) else v
    for k, v in change.items()
  }
  config = {'source': 'synthetic', 'tokenizer': 'bytes', 'dir': str(tmp_path)}
  with pytest.raises(errors.ConfigError, match=message) as caught:
    prepare_lib.prepare(DataConfig(**(config | change)))
  assert '\n' not in str(caught.value)
  assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_damage_is_seen(tmp_path):
  data = DataConfig('synthetic', 'bytes', dir=str(tmp_path))
  folder = prepare_lib.prepare(data)
  (shard,) = folder.rglob('*train.array_record*')
  shard.write_bytes(shard.read_bytes()[:-1])
  with pytest.raises(errors.ConfigError, match='damaged; delete it'):
    prepare_lib.prepare(data)


KILLED = """
import os, signal, sys
from gamma_jax.config import DataConfig
from gamma_jax.data import builder, prepare
split_of, seen = builder.split_of, []
def dies(*args):
  seen.append(1)
  if len(seen) == 900:
    os.kill(os.getpid(), signal.SIGKILL)
  return split_of(*args)
builder.split_of = dies
prepare.prepare(DataConfig('synthetic', 'bytes', dir=sys.argv[1]))
"""


def test_killed_then_two_at_once(tmp_path):
  killed = subprocess.run([sys.executable, '-c', KILLED, tmp_path])
  assert killed.returncode == -9
  left = [path for path in tmp_path.iterdir() if path.is_dir()]
  assert left and all(path.name.startswith('.') for path in left)

  # TensorFlow must not be imported, not even if it is installed.
  (tmp_path / 'tensorflow.py').write_text('import os; os._exit(99)')
  command = [sys.executable, '-m', 'gamma_jax.data', '--source=synthetic']
  command += ['--tokenizer=bytes', f'--dir={tmp_path}']
  path = os.pathsep.join([str(tmp_path), os.getcwd()])
  both = [
    subprocess.Popen(
      command,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      env=os.environ | {'PYTHONPATH': path},
    )
    for _ in range(2)
  ]
  outputs = [process.communicate()[0] for process in both]
  assert [process.returncode for process in both] == [0, 0], outputs
  (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
  counts = prepare_lib.read_manifest(folder)['splits']
  assert sum(c['documents'] for s in counts.values() for c in s.values()) == 800
  assert all(f'{counts["train"]["a"]["tokens"]:,}' in out for out in outputs)
  assert sum('prepared synthetic' in out for out in outputs) == 1


# --- training


def test_train_batches(corpus):
  data, splits = corpus
  iterator = pipeline.train_iterator(data, seed=0, batch_size=4, seq_len=15)
  everything = {b for docs in splits['train'].values() for b in docs}
  for _ in range(20):
    batch = next(iterator)
    assert set(batch) == {'tokens', 'segment_ids', 'positions'}
    for value in batch.values():
      assert value.shape == (4, 16) and value.dtype == np.int32
    assert (batch['segment_ids'] > 0).all()  # no padding
    for row in range(4):
      segments = batch['segment_ids'][row]
      for segment in range(1, segments.max() + 1):
        here = segments == segment
        np.testing.assert_array_equal(
          batch['positions'][row][here], np.arange(here.sum())
        )
        tokens = batch['tokens'][row][here]
        inside = bytes(int(t) for t in tokens if t != EOT)
        assert any(inside in document for document in everything)


def test_epochs_cover_everything_once(corpus):
  data, splits = corpus
  want = sorted(b for docs in splits['train'].values() for b in docs)
  found = train_documents(data, 2 * len(want))
  assert sorted(found[: len(want)]) == sorted(found[len(want) :]) == want
  assert found[: len(want)] != found[len(want) :]  # shuffled again


@pytest.mark.parametrize('size', [1, 2, 300, 4096, 65536, 70001])
def test_permutation(size):
  places = order.permute(np.arange(size), size, seed=5)
  assert (np.sort(places) == np.arange(size)).all()
  # One at a time as all at once.
  last = np.array([size - 1])
  assert order.permute(last, size, 5) == places[-1]


@pytest.mark.parametrize('seed', [0, 7, 2**32 - 1])
@pytest.mark.parametrize('weights', [(1.0,), (0.7, 0.3), (0.05, 1, 3)])
def test_order_is_that_of_grain(seed, weights):
  ranges = ((5, 70), (75, 5000), (5075, 33))[: len(weights)]
  streams = [
    grain.MapDataset.source(range(first, first + number))
    .seed(seed)
    .shuffle()
    .repeat()
    for first, number in ranges
  ]
  want = grain.MapDataset.mix(streams, weights)
  positions = np.arange(150)
  found = order.Order(seed, ranges, weights).documents(positions)
  assert found.tolist() == [want[i] for i in range(150)]


def grains_own(data, *, seed, batch_size, seq_len):
  """The slow path that this one replaced: the same batches, older states."""
  folder = prepare_lib.prepare(data)
  documents = pipeline._documents(folder, builder_lib.TRAIN)
  ds = grain.experimental.ConcatThenSplitIterDataset(
    documents.seed(seed)
    .shuffle()
    .repeat()
    .map(pipeline._Frame(EOT))
    .to_iter_dataset(grain.ReadOptions(num_threads=0)),
    length_struct={'tokens': seq_len + 1},
  )

  def rename(row):
    names = ('tokens', 'segment_ids', 'positions')
    return dict(zip(names, map(row.get, GRAINS), strict=True))

  return iter(ds.map(rename).batch(batch_size, drop_remainder=True))


GRAINS = ('tokens', 'tokens_segment_ids', 'tokens_positions')


def test_batches_and_states_of_grains_own_packing(corpus):
  data, _ = corpus
  kwargs = {'seed': 3, 'batch_size': 3, 'seq_len': 15}
  old, new = grains_own(data, **kwargs), pipeline.train_iterator(data, **kwargs)
  for step in range(60):
    if step % 20 == 7:  # a run that began with the old one goes on
      state = json.loads(json.dumps(old.get_state()))
      new = pipeline.train_iterator(data, **kwargs)
      new.set_state(state)
    assert digest(next(old)) == digest(next(new)), step


def test_other_text_is_refused(corpus, tmp_path):
  path = write(tmp_path / 'x.jsonl', [f'{i} some words' for i in range(50)])
  data = dataclasses.replace(corpus[0], source=f'jsonl:{path}')
  kwargs = {'seed': 0, 'batch_size': 1, 'seq_len': 15}
  state = pipeline.train_iterator(data, **kwargs).get_state()
  write(path, [f'{i} other words' for i in range(50)])
  changed = pipeline.train_iterator(data, **kwargs)
  with pytest.raises(errors.ConfigError, match='holds other text'):
    changed.set_state(state)


def test_duplicates_are_counted_and_kept(corpus, tmp_path):
  texts = [f'document {i}' for i in range(60)]
  path = write(tmp_path / 'x.jsonl', [*texts, *texts[:40], texts[0]])
  data = dataclasses.replace(corpus[0], source=f'jsonl:{path}')
  manifest = prepare_lib.read_manifest(prepare_lib.prepare(data))
  assert sum(manifest['duplicates'].values()) == 41
  kept = (split['x']['documents'] for split in manifest['splits'].values())
  assert sum(kept) == 101


MIXTURE = (('long', 0.7), ('short', 0.3))


@pytest.mark.parametrize(
  'change',
  [
    {},
    {'mixture': MIXTURE},
    pytest.param({'workers': 2}, marks=pytest.mark.slow),
  ],
)
def test_resume_is_exact(corpus, change):
  """40 straight against 17 and 23; also same and other seeds."""
  data = dataclasses.replace(corpus[0], **change)

  def start(seed=0):
    return pipeline.train_iterator(data, seed=seed, batch_size=5, seq_len=31)

  straight = take(start(), 40)
  assert len(set(straight)) == 40
  first = start()
  assert take(first, 17) == straight[:17]
  state = json.loads(json.dumps(first.get_state()))
  second = start()
  second.set_state(state)
  assert take(second, 23) == straight[17:]
  assert not set(take(start(seed=1), 40)) & set(straight)


def test_a_worker_changes_no_batch(corpus):
  data, _ = corpus
  kwargs = {'seed': 0, 'batch_size': 5, 'seq_len': 31}
  alone = take(pipeline.train_iterator(data, **kwargs), 9)
  data = dataclasses.replace(data, workers=1)
  first = pipeline.train_iterator(data, **kwargs)
  assert take(first, 4) == alone[:4]
  second = pipeline.train_iterator(data, **kwargs)
  second.set_state(json.loads(json.dumps(first.get_state())))
  assert take(second, 5) == alone[4:]


def test_mixture_is_of_tokens(corpus):
  data, splits = corpus
  data = dataclasses.replace(data, mixture=MIXTURE)
  long = set(splits['train']['long'])
  shares = collections.Counter()
  for document in train_documents(data, 2000, seq_len=511):
    shares[document in long] += len(document) + 2
  assert shares[True] / shares.total() == pytest.approx(0.7, abs=0.02)
  only = dataclasses.replace(data, mixture=(('long', 2.0),))
  assert set(train_documents(only, 300)) == long


@pytest.mark.parametrize(
  'change, kwargs, message',
  [
    ({'mixture': (('fr', 1.0),)}, {}, "no part 'fr' .* it has long, short"),
    ({'mixture': (('long', 0.0),)}, {}, 'must be above 0'),
    ({'mixture': (('long', 1.0), ('long', 2.0))}, {}, 'twice'),
    ({}, {'batch_size': 10_000}, 'fewer than one batch of 160000'),
  ],
)
def test_train_refuses(corpus, change, kwargs, message):
  data = dataclasses.replace(corpus[0], **change)
  kwargs = {'seed': 0, 'batch_size': 1, 'seq_len': 15} | kwargs
  with pytest.raises(errors.ConfigError, match=message):
    pipeline.train_iterator(data, **kwargs)


# --- evaluation


def windows(batches):
  """Every window as (doc, inputs, labels), in the order they come."""
  found = []
  for batch in batches:
    mask = batch['mask']
    assert (batch['doc'] >= 0).tolist() == mask.tolist()
    assert (batch['label_index'] >= 0).tolist() == mask.tolist()
    assert (batch['segment_ids'] > 0).tolist() == mask.tolist()
    for row in range(len(mask)):
      segments = batch['segment_ids'][row]
      for segment in range(1, segments.max() + 1):
        here = segments == segment
        (doc,) = np.unique(batch['doc'][row][here])
        positions = batch['positions'][row][here]
        assert positions.tolist() == list(range(len(positions)))
        offset = batch['label_index'][row][here] - positions
        assert np.ptp(offset) == 0 and offset[0] % len(mask[0]) == 0
        inputs, labels = batch['inputs'][row], batch['labels'][row]
        found.append((int(doc), inputs[here].tolist(), labels[here].tolist()))
  return found


def by_document(batches):
  """doc -> its windows (inputs, labels), sorted."""
  found = collections.defaultdict(list)
  for doc, inputs, labels in windows(batches):
    found[doc].append((inputs, labels))
  return {doc: sorted(found[doc]) for doc in found}


def hand_made(document, seq_len):
  """The windows of a document, cut by hand."""
  ids = [EOT, *document, EOT]
  found = []
  while len(ids) > 1:
    found.append((ids[:seq_len][: len(ids) - 1], ids[1 : seq_len + 1]))
    ids = ids[seq_len:]
  return found


@pytest.mark.parametrize('seq_len', [4, 16, 512])
def test_every_heldout_token_is_scored_once(corpus, seq_len):
  data, splits = corpus
  batches = pipeline.eval_batches(data, seq_len=seq_len, batch_size=3)
  found = by_document(batches)
  heldout = [b for docs in splits['heldout'].values() for b in docs]
  want = [sorted(hand_made(document, seq_len)) for document in heldout]
  assert sorted(found) == list(range(len(heldout)))
  assert sorted(found.values()) == sorted(want)
  scored = sum(batch['mask'].sum() for batch in batches)  # a second time
  assert scored == sum(len(document) + 1 for document in heldout)


def test_eval_does_not_depend_on_the_batch_size(corpus):
  data, _ = corpus

  def rows(batch_size):
    found = []
    batches = pipeline.eval_batches(data, seq_len=16, batch_size=batch_size)
    for batch in batches:
      for key, value in batch.items():
        assert value.shape == (batch_size, 16), key
        assert value.dtype == (bool if key == 'mask' else np.int32), key
      found += [
        {key: value[row].tolist() for key, value in batch.items()}
        for row in range(batch_size)
        if batch['mask'][row].any()
      ]
    return found

  one = rows(1)
  assert len(one) % 3 and len(one) % 8  # last batches are partial
  assert one == rows(3) == rows(8)


def test_first_documents(corpus):
  data, splits = corpus
  names = pipeline.heldout_sources(data)
  counts = collections.Counter(names)
  assert counts == {p: len(docs) for p, docs in splits['heldout'].items()}
  assert set(names[:2]) == set(names[2:4]) == {'long', 'short'}

  def evaluate(data, documents):
    batches = pipeline.eval_batches(
      data, seq_len=16, batch_size=2, documents=documents
    )
    return by_document(batches)

  everything = evaluate(data, 0)
  for doc, name in enumerate(names):
    texts = splits['heldout'][name]
    assert everything[doc] in [sorted(hand_made(text, 16)) for text in texts]
  few = evaluate(data, 10)
  assert few == {doc: everything[doc] for doc in range(10)}
  # Holding out more only adds documents.
  assert evaluate(dataclasses.replace(data, heldout_percent=60), 10) == few


def test_bytes_per_document(sample):
  """What bits per byte divides by is the size of the text."""
  tokenizer = tokenizer_lib.load_tokenizer(sample.tokenizer)
  manifest = prepare_lib.read_manifest(prepare_lib.prepare(sample))
  sizes = collections.Counter()
  sources = pipeline.heldout_sources(sample)
  for batch in pipeline.eval_batches(sample, seq_len=128, batch_size=16):
    mask = batch['mask']
    sizes_here = tokenizer.token_bytes[batch['labels'][mask]]
    for doc, size in zip(batch['doc'][mask], sizes_here, strict=True):
      sizes[sources[doc]] += int(size)
  heldout = manifest['splits']['heldout']
  assert sizes == {part: count['bytes'] for part, count in heldout.items()}


def test_nothing_held_out(tmp_path):
  data = DataConfig('synthetic', 'bytes', (), str(tmp_path), 0.0)
  next(pipeline.train_iterator(data, seed=0, batch_size=1, seq_len=8))
  for call in (pipeline.heldout_sources, eval_all):
    with pytest.raises(errors.ConfigError, match='holds out no document'):
      call(data)


def eval_all(data):
  return pipeline.eval_batches(data, seq_len=8, batch_size=1)

"""Each kind of source gives the documents that were put there, and no other."""

import json
import time

import numpy as np
import pytest
import tensorflow_datasets as tfds

from gamma_jax import errors
from gamma_jax.config import DataConfig
from gamma_jax.data import hub, prepare, sources

TEXTS = ['one', '二\n三', 'four  ', '\U0001f600']


def read(source):
  found = sources.open_source(source, None)
  documents = list(found.documents())
  ends = [document.position for document in documents]
  assert ends == sorted(ends) and ends[-1] <= found.size
  return found, [(document.part, document.text) for document in documents]


@pytest.fixture(scope='module')
def parquet(tmp_path_factory):
  """A folder of two Parquet files: TEXTS in 'body', with holes."""
  pyarrow = pytest.importorskip('pyarrow')
  writer = pytest.importorskip('pyarrow.parquet')
  folder = tmp_path_factory.mktemp('set')
  for name, texts in (('b', TEXTS[2:]), ('a', [*TEXTS[:2], '', None])):
    table = pyarrow.table({'id': range(len(texts)), 'body': texts})
    writer.write_table(table, folder / f'{name}.parquet')
  return folder


def test_text_files(tmp_path):
  for part, name, text in (
    ('zh', 'x.txt', '學而'.encode()),
    ('en', 'y.txt', b'not \xff UTF-8'),
    ('en', 'empty.txt', b''),
  ):
    (tmp_path / part).mkdir(exist_ok=True)
    (tmp_path / part / name).write_bytes(text)
  found, documents = read(f'text:{tmp_path}/*/*.txt')
  assert found.parts == ('en', 'zh')
  assert documents == [('en', b'not \xff UTF-8'), ('zh', '學而'.encode())]


def test_parquet(parquet):
  found, documents = read(f'parquet:{parquet}/*.parquet:body')
  assert found.parts == (parquet.name,)
  assert documents == [(parquet.name, text) for text in TEXTS]


@pytest.mark.parametrize(
  ('source', 'message'),
  [
    ('parquet:{}/*.parquet', "no column 'text'; it has id, body"),
    ('parquet:{}/*.parquet:id', "'id' holds int, not text"),
    ('parquet:{}/none', 'no file matches'),
    (f'parquet:{__file__}', 'is not a Parquet file'),
    ('hf:a/b,colum=x', "no option 'colum'; it knows column, config, split"),
    ('hf:a/b,split=', "no option 'split'"),
    ('tfds:no_such_set_here', 'cannot be read'),
    ('csv:x', 'is not sample, synthetic or jsonl'),
  ],
)
def test_refuses(parquet, source, message):
  with pytest.raises(errors.ConfigError, match=message) as caught:
    read(source.format(parquet))
  assert '\n' not in str(caught.value)


def test_no_network_fails_at_once(monkeypatch):
  pytest.importorskip('datasets')
  monkeypatch.delenv('HF_HUB_OFFLINE', raising=False)
  monkeypatch.setenv('HF_ENDPOINT', 'http://127.0.0.1:9')  # nobody listens
  start = time.monotonic()
  with pytest.raises(errors.ConfigError, match='no network .* use parquet:'):
    read('hf:HuggingFaceFW/fineweb-edu,config=sample-10BT')
  assert time.monotonic() - start < hub.TIMEOUT + 5


def test_library_that_is_not_there(monkeypatch):
  monkeypatch.setitem(__import__('sys').modules, 'datasets', None)
  with pytest.raises(errors.ConfigError, match=r"pip install 'gamma_jax\[hub"):
    read('hf:a/b')


@pytest.mark.filterwarnings('ignore')  # those of datasets are not ours
def test_hub_reads_a_local_folder(parquet):
  pytest.importorskip('datasets')
  found, documents = read(f'hf:{parquet},column=body')
  assert found.parts == (parquet.name,)
  assert [text for _, text in documents] == TEXTS


@pytest.mark.filterwarnings('ignore')
def test_hub_reads_a_list_of_paragraphs_as_one_text(tmp_path):
  pytest.importorskip('datasets')
  rows = [['first\n', 'second'], [], ['third', 'fourth']]
  lines = ''.join(json.dumps({'text': row}) + '\n' for row in rows)
  (tmp_path / 'x.jsonl').write_text(lines)
  _, documents = read(f'hf:{tmp_path}')
  assert [text for _, text in documents] == [
    'first\nsecond',
    'third\nfourth',
  ]


class Letters(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  VERSION = tfds.core.Version('1.0.0')

  def _info(self):
    features = tfds.features.FeaturesDict({'text': tfds.features.Text()})
    return tfds.core.DatasetInfo(
      builder=self, features=features, disable_shuffling=True
    )

  def _split_generators(self, dl_manager):
    return {'train': self._generate_examples()}

  def _generate_examples(self):
    for i, text in enumerate(TEXTS):
      yield i, {'text': text}


def test_tfds_that_lies_prepared(tmp_path):
  tfds.disable_progress_bar()
  Letters(file_format='array_record', data_dir=tmp_path).download_and_prepare()
  _, documents = read(f'tfds:letters,data_dir={tmp_path}')
  assert documents == [('letters', text.encode()) for text in TEXTS]
  with pytest.raises(errors.ConfigError, match='no column'):
    read(f'tfds:letters,data_dir={tmp_path},column=x')


def test_same_text_same_tokens_whatever_the_kind(parquet, tmp_path):
  folder = tmp_path / parquet.name
  folder.mkdir()
  for i, text in enumerate(TEXTS):
    (folder / f'{i}.txt').write_text(text)
  contents, tokens = [], []
  for source in (f'text:{folder}/*', f'parquet:{parquet}/*.parquet:body'):
    data = DataConfig(source, 'bytes', dir=str(tmp_path / 'out'))
    built = prepare.prepare(data)
    contents.append(prepare.read_manifest(built)['content'])
    tokens.append(np.fromfile(built / 'train.tokens', np.uint16).tolist())
  assert contents[0] == contents[1]
  assert tokens[0] == tokens[1]

import base64
import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from gamma_jax import errors
from gamma_jax.config import DataConfig
from gamma_jax.data import prepare
from gamma_jax.data import tokenizer as tokenizer_lib
from gamma_jax.data.__main__ import main

NAMES = ('bpe4k', 'bytes')
# Characters and bytes that pattern, merges or specials may trip over.
TEXT = st.one_of(
  st.text(),
  st.text(st.sampled_from("a \n\r\t'的。,7<|>endoftext\u3000\ud800\U0001f600")),
  st.lists(
    st.sampled_from([tokenizer_lib.EOT, ' the', '子曰：“', '123456', "'LL"])
  ).map(''.join),
)
DATA = st.one_of(
  st.binary(),
  st.lists(st.sampled_from([b'\xe5', b'\xad', b'\x90a'])).map(b''.join),
)


@pytest.mark.parametrize('name', NAMES)
@hypothesis.given(TEXT)
def test_text_round_trip(name, text):
  tokenizer = tokenizer_lib.load_tokenizer(name)
  ids = tokenizer.encode(text)
  assert ids.dtype == np.uint16
  assert tokenizer.eot_id not in ids
  assert tokenizer.decode(ids) == text.encode('utf-8', 'surrogatepass')


@pytest.mark.parametrize('name', NAMES)
@hypothesis.given(DATA)
def test_bytes_round_trip(name, data):
  tokenizer = tokenizer_lib.load_tokenizer(name)
  ids = tokenizer.encode(data)
  assert tokenizer.decode(ids) == data
  assert tokenizer.token_bytes[ids].sum() == len(data)


def test_valid_bytes_encode_as_their_text():
  tokenizer = tokenizer_lib.load_tokenizer('bpe4k')
  text = 'In the beginning 子曰：“學而時習之”'
  ids = tokenizer.encode(text)
  np.testing.assert_array_equal(tokenizer.encode(text.encode()), ids)
  assert len(ids) < len(text)  # merges are used


@pytest.mark.parametrize('text', ['a', ' ', '中', '\n', '7'])
def test_long_runs(text):
  tokenizer = tokenizer_lib.load_tokenizer('bpe4k')
  text *= 3 * tokenizer_lib.MAX_CHARS + 1
  assert tokenizer.decode(tokenizer.encode(text)) == text.encode()


def test_sizes():
  bpe = tokenizer_lib.load_tokenizer('bpe4k')
  assert bpe.vocab_size == len(bpe.token_bytes) == 4096
  assert bpe.eot_id == 4095
  assert bpe.token_bytes[bpe.eot_id] == 0 < bpe.token_bytes[:-1].min()
  assert bpe.token_bytes.dtype == np.int32
  plain = tokenizer_lib.load_tokenizer('bytes')
  assert (plain.vocab_size, plain.eot_id) == (257, 256)
  np.testing.assert_array_equal(plain.encode('ab\n'), [97, 98, 10])
  assert bpe.fingerprint != plain.fingerprint


def test_smallest_dtype():
  ranks = [bytes([b]) for b in range(256)]
  more = [n.to_bytes(3, 'big') for n in range(2**16 - 256)]
  sizes = {255: np.uint16, 2**16 - 1: np.uint16, 2**16: np.uint32}
  for size, dtype in sizes.items():
    if size >= 256:
      tokenizer = tokenizer_lib.Tokenizer('.', (ranks + more)[:size])
      assert tokenizer.dtype == dtype, size


def test_train_save_load(tmp_path):
  texts = ['the cat sat on the mat', '學而時習之，不亦說乎', tokenizer_lib.EOT]
  trained = tokenizer_lib.train_bpe(texts * 9, 280, tmp_path / 'a.json')
  tokenizer_lib.train_bpe(texts * 9, 280, tmp_path / 'b.json')
  assert trained.vocab_size == 280
  loaded = tokenizer_lib.load_tokenizer(str(tmp_path / 'a.json'))
  assert loaded.fingerprint == trained.fingerprint
  again = (tmp_path / 'b.json').read_bytes()
  assert (tmp_path / 'a.json').read_bytes() == again
  for text in texts:
    ids = loaded.encode(text)
    np.testing.assert_array_equal(ids, trained.encode(text))
    assert loaded.decode(ids) == text.encode()
    assert loaded.eot_id not in ids


def test_train_refuses(tmp_path):
  with pytest.raises(errors.ConfigError, match='too little text'):
    tokenizer_lib.train_bpe(['abc'], 4096, tmp_path / 'a.json')
  with pytest.raises(errors.ConfigError, match='257'):
    tokenizer_lib.train_bpe(['abc'], 256, tmp_path / 'a.json')
  assert not list(tmp_path.iterdir())


def test_load_refuses(tmp_path):
  with pytest.raises(errors.ConfigError, match='no tokenizer'):
    tokenizer_lib.load_tokenizer(str(tmp_path / 'none.json'))
  good = json.loads((tokenizer_lib.SAMPLE / 'bpe4k.json').read_text())
  bad = [
    {},
    [],
    good | {'ranks': good['ranks'][1:]},  # a byte is missing
    good | {'special': []},
    good | {'ranks': good['ranks'] + good['ranks'][-1:]},
  ]
  for i, data in enumerate(bad):
    path = tmp_path / f'{i}.json'
    path.write_text(json.dumps(data))
    with pytest.raises(errors.ConfigError, match='not a tokenizer file'):
      tokenizer_lib.load_tokenizer(str(path))


# --- files of other projects

# What byte-level and byte-fallback models may trip over.
MIXED = st.one_of(
  st.text(),
  st.lists(
    st.sampled_from(
      ['the ', ' the', '  ', '\n', '子曰', '\U0001f600', 'é', 'e\u0301']
    )
  ).map(''.join),
).filter(lambda text: not any('\ud800' <= char <= '\udfff' for char in text))
CORPUS = ['the cat sat on the mat', '學而時習之，不亦說乎', 'a  b\n\nc'] * 20


@pytest.fixture(scope='module')
def hugging_face(tmp_path_factory):
  library = pytest.importorskip('tokenizers')
  model = library.Tokenizer(library.models.BPE())
  model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
  model.decoder = library.decoders.ByteLevel()
  trainer = library.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=[tokenizer_lib.EOT],
    initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  model.train_from_iterator(CORPUS, trainer)
  path = tmp_path_factory.mktemp('hf') / 'tokenizer.json'
  model.save(str(path))
  return path, model


@pytest.fixture(scope='module')
def sentence_piece(tmp_path_factory):
  """Models with and without normalisation and bytes for what they lack."""
  library = pytest.importorskip('sentencepiece')
  folder = tmp_path_factory.mktemp('sp')
  (folder / 'text').write_text('\n'.join(CORPUS))
  for name, options in (
    (
      'identity',
      {
        'byte_fallback': True,
        'normalization_rule_name': 'identity',
        'remove_extra_whitespaces': False,
        'add_dummy_prefix': False,
      },
    ),
    ('default', {}),
  ):
    library.SentencePieceTrainer.train(
      input=str(folder / 'text'),
      model_prefix=str(folder / name),
      vocab_size=330 if name == 'identity' else 40,
      model_type='bpe',
      hard_vocab_limit=False,
      minloglevel=2,
      **options,
    )
  return folder


@hypothesis.given(MIXED)
def test_hugging_face_round_trip(hugging_face, text):
  path, model = hugging_face
  tokenizer = load(path)
  ids = tokenizer.encode(text)
  assert tokenizer.exact
  assert tokenizer.decode(ids) == text.encode()
  assert tokenizer.token_bytes[ids].sum() == len(text.encode())
  if '<' not in text:
    assert ids.tolist() == model.encode(text).ids


def test_hugging_face_specials_are_text(hugging_face):
  tokenizer = load(hugging_face[0])
  ids = tokenizer.encode(f'a{tokenizer_lib.EOT}b')
  assert tokenizer.decode(ids) == f'a{tokenizer_lib.EOT}b'.encode()
  size = hugging_face[1].get_vocab_size()
  assert (tokenizer.eot_id, tokenizer.vocab_size) == (size, size + 1)
  with pytest.raises(errors.ConfigError, match='not UTF-8'):
    tokenizer.encode(b'a\xff')


def test_hugging_face_that_normalizes_is_not_exact(hugging_face, tmp_path):
  tree = json.loads(hugging_face[0].read_text())
  tree['normalizer'] = {'type': 'NFC'}
  (tmp_path / 'nfc').write_text(json.dumps(tree))
  tokenizer = load(tmp_path / 'nfc')
  assert not tokenizer.exact
  assert tokenizer.decode(tokenizer.encode('e\u0301')) == 'é'.encode()


@hypothesis.given(MIXED)
def test_sentence_piece_round_trip(sentence_piece, text):
  """Without normalisation all comes back but its own sign for a space."""
  hypothesis.assume('\u2581' not in text and '\0' not in text)
  tokenizer = load(sentence_piece / 'identity.model')
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text.encode()
  assert tokenizer.eot_id not in ids


def test_sentence_piece_loses_what_its_file_says(sentence_piece, tmp_path):
  tokenizer = load(sentence_piece / 'default.model')
  assert not tokenizer.exact
  assert tokenizer.decode(tokenizer.encode('the  cat')) == b' the cat'
  path = tmp_path / 'x.jsonl'
  texts = ['the  cat', 'no \U0001f600']
  path.write_text('\n'.join(json.dumps({'text': text}) for text in texts))
  data = DataConfig(
    f'jsonl:{path}',
    str(sentence_piece / 'default.model'),
    dir=str(tmp_path),
    heldout_percent=0.0,
  )
  assert prepare.read_manifest(prepare.prepare(data))['changed'] == 2


def test_ranks_of_tiktoken(tmp_path):
  bpe = tokenizer_lib.load_tokenizer('bpe4k')
  ranks = [bpe.decode([i]) for i in range(bpe.eot_id)]
  lines = [
    base64.b64encode(token) + b' %d\n' % i for i, token in enumerate(ranks)
  ]
  (tmp_path / 'x.tiktoken').write_bytes(b''.join(lines))
  loaded = load(tmp_path / 'x.tiktoken')
  assert loaded.fingerprint == bpe.fingerprint
  (tmp_path / 'y').write_bytes(b''.join(lines[1:]))
  with pytest.raises(errors.ConfigError, match='ranks must be'):
    load(tmp_path / 'y')


@pytest.mark.parametrize('data', [b'', b'\0\1\2', b'{"model": {}}', b'text'])
def test_no_tokenizer_at_all(data, tmp_path):
  pytest.importorskip('tokenizers')
  pytest.importorskip('sentencepiece')
  (tmp_path / 'x').write_bytes(data)
  with pytest.raises(errors.ConfigError, match='not a tokenizer file'):
    load(tmp_path / 'x')


def load(path):
  return tokenizer_lib.load_tokenizer(str(path))


def test_train_command(tmp_path, capsys):
  (tmp_path / 'x.jsonl').write_text(json.dumps({'text': 'ab ab abc' * 99}))
  out = tmp_path / 'bpe.json'
  command = ['train-tokenizer', f'--source=jsonl:{tmp_path}/*.jsonl']
  assert main([*command, '--vocab_size=259', f'--out={out}']) == 0
  assert '259 ids' in capsys.readouterr().out
  assert load(out).vocab_size == 259
  assert main([*command, '--vocab_size=9999', f'--out={out}']) == 2
  assert 'too little text' in capsys.readouterr().err

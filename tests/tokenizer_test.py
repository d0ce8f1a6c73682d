import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from gamma_jax import errors
from gamma_jax.data import tokenizer as tokenizer_lib

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

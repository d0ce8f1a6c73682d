"""The page shows every token as it is, and nothing that is in a text runs."""

import html.parser
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gamma_jax import token_page, token_text
from gamma_jax.analysis import token_examples, token_gap
from gamma_jax.data import tokenizer as tokenizer_lib

EVIL = '<script>alert("1")</script>&amp;\'"--> 學而時習之\n\u202eend'
BYTES = tokenizer_lib.load_tokenizer('bytes')


class Reader(html.parser.HTMLParser):
  """Collects tags, titles, and the text of the examples without its marks."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.titles, self.colours = set(), [], []
    self.text, self.inside = '', []
    self.feed(text)

  def handle_starttag(self, tag, attributes):
    self.tags.add(tag)
    self.inside.append(tag)
    if tag == 'span' and 'pre' in self.inside:
      self.titles.append(dict(attributes)['title'])
      self.colours.append(dict(attributes)['style'])
    if tag in ('meta', 'circle', 'line'):
      self.inside.pop()

  def handle_endtag(self, tag):
    while self.inside and self.inside.pop() != tag:
      pass

  def handle_data(self, data):
    if 'pre' in self.inside and 'i' not in self.inside:
      self.text += data


def strip_marks(parts):
  return Reader(f'<pre>{"".join(parts)}</pre>').text


def make_page(text, names=('a', 'b')):
  ids = np.append(BYTES.encode(text), BYTES.eot_id).astype(np.int64)
  n = len(ids)
  nll_b = np.linspace(0.5, 4, n).astype(np.float32)
  nll_a = np.full(n, 2.0, np.float32)
  block = token_gap.Block(np.zeros(n, int), np.arange(n), ids, nll_a, nll_b)
  gap = token_gap.analyse(
    [block], documents=2, vocab_size=BYTES.vocab_size, bins=4, replicates=9
  )
  extremes = token_examples.extremes(
    [block], count=3, before=n, after=n, window=n
  )
  return token_page.page(names, gap, extremes, BYTES, ['<zh>', 'en'], n)


def test_text_reads_as_it_is_and_cannot_run():
  page = Reader(make_page(EVIL, names=('<script>', '<b>"')))
  assert not page.tags & {'script', 'img', 'link', 'iframe', 'a', 'object'}
  whole = EVIL.replace('\u202e', '')
  # One gaining and one losing example, each with the whole text.
  assert page.text.replace('\n', '') == 2 * whole.replace('\n', '')
  assert 'http:' not in make_page('plain')
  assert 'https' not in make_page('plain')
  assert len(page.titles) == 2 * (len(EVIL.encode()) + 1)
  assert '(id 256): Delta_sym' in page.titles[-1]


def test_colours_follow_the_sign():
  page = Reader(make_page('abcdefgh'))
  # nll_b grows through nll_a: b is better first, then a.
  assert page.colours[0] == f'background:{token_text.colour(-0.635)}'
  red, _, blue = (int(token_text.colour(0.9)[i : i + 2], 16) for i in (1, 3, 5))
  assert blue > red
  red, _, blue = (
    int(token_text.colour(-0.9)[i : i + 2], 16) for i in (1, 3, 5)
  )
  assert red > blue
  assert token_text.colour(0.0) == '#ffffff'


@pytest.mark.parametrize(
  ('pieces', 'want'),
  [
    ([b'a', b' b'], ['a', ' b']),
    (['学'.encode()], ['学']),
    ([b'\xe5', b'\xad\xa6x'], ['<i>E5</i>', '学x']),
    ([b'\xe5', b'\xad', b'\xa6'], ['<i>E5</i>', '<i>AD</i>', '学']),
    ([b'\xa6a'], ['<i>A6</i>a']),  # the text begins inside a character
    ([b'\xe5\xad', b'a'], ['<i>E5</i><i>AD</i>', 'a']),  # never finished
    ([b'\xe5', b'\xe5\xad\xa6'], ['<i>E5</i>', '学']),
    ([b'\xe5', None, b'\xad'], ['<i>E5</i>', '<i>⟨end⟩</i>', '<i>AD</i>']),
    ([b'\n', b'\t'], ['<i>⏎</i>\n', '<i>⇥</i>']),
    (['\u202e\u3000'.encode()], ['<i>U+202E</i>\u3000']),
    ([b'<&"\x00'], ['&lt;&amp;&quot;<i>U+0000</i>']),
  ],
)
def test_pieces(pieces, want):
  assert token_text.shown(pieces) == want


@settings(max_examples=50, deadline=None)
@given(st.text(), st.data())
def test_any_text_cut_anywhere_reads_as_it_is(text, data):
  whole = text.encode()
  cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=9))
  edges = [0, *sorted(cuts), len(whole)]
  pieces = [whole[i:j] for i, j in zip(edges, edges[1:])]
  shown = token_text.shown(pieces)
  assert len(shown) == len(pieces)
  visible = ''.join(c for c in text if c == '\n' or token_text._escape(c) == c)
  assert strip_marks(shown) == visible


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=5), max_size=8))
def test_any_bytes_can_be_shown(pieces):
  shown = token_text.shown(pieces)
  assert len(shown) == len(pieces)
  for piece, part in zip(pieces, shown, strict=True):
    assert bool(part) == bool(piece)  # every token can be seen
    assert Reader(part).tags <= {'i'}
    assert token_text.plain(piece).isprintable()


@pytest.mark.parametrize(
  ('gains', 'want'),
  [
    ([0.5, 0.2], ['+0', '+0.5']),
    ([0.5, -0.3], ['+0', '-0.3', '+0.5']),
    ([0.5, -0.001], ['+0', '+0.5']),  # -0.001 would lie on the 0
  ],
)
def test_labels_of_the_axis_do_not_overlap(gains, want):
  bins = [
    token_gap.Bin(
      low=i,
      high=i + 1,
      tokens=1,
      documents=1,
      nll_a=1.0,
      nll_b=1.0,
      gain=token_gap.Estimate(g, g, g),
      delta_sym=token_gap.Estimate(g, g, g),
      contribution=g,
    )
    for i, g in enumerate(gains)
  ]
  chart = token_page._chart('gain', bins, lambda one: one.gain)
  labels = re.findall(r'text-anchor="end">([^<]+)<', chart)
  assert labels == want

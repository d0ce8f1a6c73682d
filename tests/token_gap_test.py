"""Gaps between two models on made-up NLLs whose answer is known."""

import numpy as np
import pytest

from gamma_jax.analysis import exact_quantiles, token_examples, token_gap
from gamma_jax.analysis.token_gap import Block

DOCUMENTS, LENGTH, V, WINDOW = 60, 100, 50, 32


def rows(seed=0, planted=0.0, documents=DOCUMENTS):
  """Difficulties 0 to 6 nats; a is `planted` nats better from 2 up to 4."""
  rng = np.random.default_rng(seed)
  n = documents * LENGTH
  hard = rng.uniform(0, 6, n)
  half = np.where((hard >= 2) & (hard < 4), planted / 2, 0.0)
  half += rng.normal(0, 0.02, n) * (planted > 0)
  half = np.clip(half, -hard, hard)
  return Block(
    doc=np.repeat(np.arange(documents), LENGTH),
    position=np.tile(np.arange(LENGTH), documents),
    token=np.minimum(rng.geometric(0.1, n), V) - 1,
    nll_a=(hard - half).astype(np.float32),
    nll_b=(hard + half).astype(np.float32),
  )


def cut(block, size):
  """The same rows in blocks of `size`."""
  return [
    Block(*(x[i : i + size] for x in block))
    for i in range(0, len(block.doc), size)
  ]


def analyse(blocks, **kwargs):
  kwargs = {'bins': 12, 'replicates': 200} | kwargs
  return token_gap.analyse(blocks, documents=DOCUMENTS, vocab_size=V, **kwargs)


def numbers(gap):
  """All of a TokenGap as one list of floats."""
  out = []
  for one in [gap.overall, *gap.difficulty, *gap.frequency]:
    out += [one.low, one.high, one.tokens, one.documents, one.nll_a]
    out += [one.nll_b, one.contribution]
    for e in (one.gain, one.delta_sym):
      out += [e.mean, e.low, e.high]
  return np.array(out)


def test_delta_sym_is_the_ratio_of_probabilities():
  a, b = np.array([0.1, 2.0, 5.0]), np.array([0.3, 1.0, 5.0])
  p, q = np.exp(-a), np.exp(-b)
  np.testing.assert_allclose(token_gap.delta_sym(a, b), (p - q) / (p + q))
  assert token_gap.delta_sym(a, b)[0] > 0  # a gives more to the true token
  far = token_gap.delta_sym(np.array([2000.0]), np.array([2002.0]))
  np.testing.assert_allclose(far, np.tanh(1.0))  # both p are 0 in float64


def test_a_planted_gain_is_found_where_it_is():
  gap = analyse([rows(planted=0.5)])
  assert len(gap.difficulty) == 12
  for one in gap.difficulty:
    medium = one.low > 1.9 and one.high < 4.1
    outside = one.high < 2.0 or one.low > 4.0
    assert one.tokens == DOCUMENTS * LENGTH / 12
    if medium:
      assert one.gain.mean == pytest.approx(0.5, abs=0.02)
      assert one.delta_sym.mean == pytest.approx(np.tanh(0.25), abs=0.01)
      assert 0.4 < one.gain.low < one.gain.mean < one.gain.high
    elif outside:
      assert abs(one.gain.mean) < 0.01
      assert one.gain.low < 0 < one.gain.high or abs(one.gain.mean) < 0.004
  found = sum(one.contribution for one in gap.difficulty)
  assert found == pytest.approx(gap.overall.gain.mean)
  assert gap.overall.gain.mean == pytest.approx(0.5 / 3, abs=0.02)
  assert sum(one.tokens for one in gap.frequency) == gap.overall.tokens


def test_identical_arms_differ_by_exactly_nothing():
  block = rows()
  gap = analyse([block._replace(nll_b=block.nll_a)])
  for one in [gap.overall, *gap.difficulty, *gap.frequency]:
    assert one.contribution == 0
    for e in (one.gain, one.delta_sym):
      assert e.mean == 0
      if one.documents > 1:
        assert (e.low, e.high) == (0, 0)
  assert not gap.token_gain.any()
  same = block._replace(nll_b=block.nll_a)
  assert extremes([same]) == ([], [])


def test_swapping_the_arms_flips_every_sign():
  block = rows(planted=0.5)
  swapped = block._replace(nll_a=block.nll_b, nll_b=block.nll_a)
  gap, other = analyse([block]), analyse([swapped])
  for one, two in zip(
    [gap.overall, *gap.difficulty, *gap.frequency],
    [other.overall, *other.difficulty, *other.frequency],
    strict=True,
  ):
    assert (one.low, one.high) == (two.low, two.high)
    assert one.nll_a == two.nll_b
    assert one.contribution == -two.contribution
    for e, f in ((one.gain, two.gain), (one.delta_sym, two.delta_sym)):
      assert e.mean == pytest.approx(-f.mean, abs=1e-15)
      assert e.low == pytest.approx(-f.high, abs=1e-12, nan_ok=True)
  gaining, losing = extremes([block])
  assert places(extremes([swapped])) == places((losing, gaining))


def test_blocks_change_nothing(monkeypatch):
  monkeypatch.setattr(token_gap, 'CHUNK', 16)  # several draws
  block = rows(planted=0.5)
  want, examples = numbers(analyse([block])), extremes([block])
  for size in (37, 999):  # cuts documents anywhere
    blocks = cut(block, size)
    np.testing.assert_allclose(
      numbers(analyse(blocks)), want, rtol=1e-9, atol=1e-12
    )
    assert places(extremes(blocks)) == places(examples)


def test_nor_does_the_order_of_the_rows():
  block = rows(planted=0.5)
  order = np.random.default_rng(1).permutation(len(block.doc))
  shuffled = Block(*(x[order] for x in block))
  np.testing.assert_allclose(
    numbers(analyse([shuffled])),
    numbers(analyse([block])),
    rtol=1e-9,
    atol=1e-12,
  )


@pytest.mark.parametrize('bins', [1, 2, 7, 20])
def test_quantiles_are_exact(bins):
  rng = np.random.default_rng(bins)
  values = rng.lognormal(0, 3, 5000).astype(np.float32)
  values[:700], values[700:710] = 0.0, -0.0  # ties
  blocks = np.array_split(values, 9)
  ranks = [i * len(values) // bins for i in range(1, bins)]
  want = np.unique(np.sort(values)[ranks]) if ranks else []
  got = exact_quantiles.quantile_edges(blocks, bins)
  np.testing.assert_array_equal(got, np.array(want, np.float32))


def test_frequency_bins_are_half_decades():
  counts = np.array([0, 1, 9, 90, 900])
  bins, edges = token_gap.frequency_bins(counts)
  np.testing.assert_array_equal(bins[1:], [0, 1, 3, 5])
  share = counts / counts.sum()
  for i in range(1, 5):
    assert edges[bins[i]] <= share[i] < edges[bins[i] + 1]


def test_intervals_are_those_of_documents(monkeypatch):
  """A gain that a document shares by half: tokens alone would look certain."""
  monkeypatch.setattr(token_gap, 'CHUNK', 16)
  rng = np.random.default_rng(0)
  truth, covered, widths, runs = 0.1, 0, [], 40
  for seed in range(runs):
    shift = np.repeat(rng.normal(truth, 0.3, DOCUMENTS), LENGTH)
    block = rows(seed)
    block = block._replace(nll_b=(block.nll_a + shift).astype(np.float32))
    e = analyse([block], bins=2, seed=seed).overall.gain
    covered += e.low <= truth <= e.high
    widths.append(e.high - e.low)
  # 95 % of 40 is 38; under 33 has a chance of 1 in 1000.
  assert covered >= 33
  want = 2 * 1.96 * 0.3 / np.sqrt(DOCUMENTS)
  assert np.mean(widths) == pytest.approx(want, rel=0.1)


def test_no_two_documents_share_a_weight(monkeypatch):
  """If draws repeated, documents alike would vary together: twice as wide."""
  monkeypatch.setattr(token_gap, 'CHUNK', 15)
  shift = np.tile(np.random.default_rng(0).normal(0, 1, 15), 4)
  block = rows()
  nll_b = block.nll_a + np.repeat(shift, LENGTH)
  block = block._replace(nll_b=nll_b.astype(np.float32))
  e = analyse([block], bins=2, replicates=2000).overall.gain
  want = 2 * 1.96 * shift.std() / np.sqrt(DOCUMENTS)
  assert e.high - e.low == pytest.approx(want, rel=0.15)


def test_one_document_gives_no_interval():
  gap = analyse([rows(planted=0.5, documents=1)])
  assert gap.overall.documents == 1
  assert np.isnan([gap.overall.gain.low, gap.overall.gain.high]).all()


def test_what_cannot_be_compared_is_refused():
  with pytest.raises(ValueError, match='no token'):
    analyse(cut(rows(), LENGTH)[:0])
  block = rows()
  block.nll_a[17] = np.nan
  with pytest.raises(ValueError, match='not finite'):
    analyse([block])


def extremes(blocks):
  return token_examples.extremes(
    blocks, count=5, before=0, after=0, window=WINDOW
  )


def places(pair):
  return [[(e.doc, e.position) for e in examples] for examples in pair]


def test_extremes_are_the_largest_of_different_documents():
  block = rows(planted=0.5)
  gains = token_gap.gain(block.nll_a, block.nll_b).reshape(DOCUMENTS, LENGTH)
  gaining, losing = extremes([block])
  for examples, signed in ((gaining, gains), (losing, -gains)):
    order = np.argsort(-signed.max(axis=1), kind='stable')[:5]
    want = [(doc, signed[doc].argmax()) for doc in order]
    assert [(e.doc, e.position) for e in examples] == want


def test_context_stays_in_the_window_of_the_token():
  block = rows(planted=0.5, documents=3)
  block.nll_b[LENGTH + 33] += 50  # second of its window
  block.nll_a[2 * LENGTH + 99] += 50  # last of its document
  gaining, losing = token_examples.extremes(
    [block], count=1, before=4, after=6, window=WINDOW
  )
  (e,), (f,) = gaining, losing
  assert (e.doc, e.position, e.at) == (1, 33, 1)
  assert (f.doc, f.position, f.at) == (2, 99, 3)  # a window starts at 96
  np.testing.assert_array_equal(e.token, block.token[LENGTH + 32 : LENGTH + 40])
  np.testing.assert_array_equal(f.nll_a, block.nll_a[-4:])

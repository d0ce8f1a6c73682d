"""Pairs, their statistics, and how many seeds a claim needs."""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from gamma_jax import errors, results
from gamma_jax.analysis import paired

A, B = {'init.gamma': 0.5}, {'init.gamma': 1.0}


def row(loss, **overrides):
  names = {'gamma': 'init.gamma', 'rule': 'init.rule', 'lr': 'opt.lr'}
  return {
    'overrides': {names.get(k, k): v for k, v in overrides.items()},
    'metrics': {'heldout/loss': loss},
  }


def test_difference_against_numbers_by_hand():
  # Differences -1, -2, -3: mean -2, sd 1; t(0.975, 2) = 4.302653.
  d = paired.paired_difference([5.0, 6.0, 7.0], [4.0, 4.0, 4.0])
  assert (d.n, d.mean, d.sd, d.indicative) == (3, -2.0, 1.0, False)
  half = 4.302653 / math.sqrt(3)
  assert d.t_interval == pytest.approx((-2 - half, -2 + half), rel=1e-6)
  # t = -2 sqrt 3; with 2 degrees of freedom p = 1 - |t| / sqrt(t^2 + 2).
  assert d.p_value == pytest.approx(1 - math.sqrt(12 / 14), rel=1e-9)


def test_difference_against_scipy():
  rng = np.random.default_rng(0)
  a, b = rng.normal(size=(2, 12))
  d = paired.paired_difference(a, b)
  want = stats.ttest_rel(b, a)
  assert d.p_value == pytest.approx(want.pvalue)
  assert d.t_interval == pytest.approx(tuple(want.confidence_interval()))
  boot = stats.bootstrap((b - a,), np.mean, rng=np.random.default_rng(0))
  assert d.bootstrap_interval == tuple(boot.confidence_interval)
  assert d == paired.paired_difference(a, b)
  other = paired.paired_difference(a, b, rng_seed=1)
  assert d.bootstrap_interval != other.bootstrap_interval


@pytest.mark.parametrize('n', [0, 1, 2])
def test_few_pairs_are_indicative(n):
  d = paired.paired_difference(np.zeros(n), np.arange(n) + 1.0)
  assert (d.n, d.indicative) == (n, True)
  known = [d.sd, d.p_value, *d.t_interval, *d.bootstrap_interval]
  assert [math.isnan(value) for value in known] == [n < 2] * 6
  assert math.isnan(d.mean) == (n == 0)


def test_equal_differences_have_no_p_value():
  d = paired.paired_difference([1.0, 2.0, 3.0], [1.5, 2.5, 3.5])
  assert d.mean == 0.5 and d.sd == 0 and math.isnan(d.p_value)
  assert d.t_interval == d.bootstrap_interval == (0.5, 0.5)


@pytest.mark.parametrize(
  ('a', 'b', 'words'),
  [
    ([1.0], [1.0, 2.0], 'one length'),
    ([[1.0]], [[1.0]], 'one length'),
    ([1.0, 2.0], [1.0, math.nan], 'finite'),
    ([1.0, math.inf], [1.0, 2.0], 'finite'),
  ],
)
def test_bad_values(a, b, words):
  with pytest.raises(ValueError, match=words):
    paired.paired_difference(a, b)


# Multiples of 1/64 add without rounding, so equality is exact.
GRID = st.integers(-640, 640).map(lambda i: i / 64)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(hnp.arrays(float, (3, 5), elements=GRID))
def test_what_a_seed_adds_to_both_arms_cancels(values):
  a, b, common = values
  got = paired.paired_difference(a + common, b + common)
  # By repr: nan equals nan there.
  assert repr(got) == repr(paired.paired_difference(a, b))
  swapped = paired.paired_difference(b, a)
  assert swapped.mean == -got.mean
  assert repr(swapped.p_value) == repr(got.p_value)


def test_pairs_match_seed_and_every_other_key():
  rows = [
    row(10 * s + seed + gamma, gamma=gamma, size=size, seed=seed)
    for s, size in enumerate(('tiny', 'small'))
    for gamma in (0.5, 0.75, 1.0)
    for seed in (0, 1)
  ]
  for shuffled in (rows, rows[::-1]):
    pairs = paired.pair(shuffled, A, B)
    np.testing.assert_array_equal(pairs.b - pairs.a, 0.5)
    assert len(pairs.settings) == 4 and not pairs.unpaired
    at = list(pairs.settings).index({'size': 'small', 'seed': 1})
    assert pairs.a[at] == 11.5


def test_leftovers_are_named():
  rows = [row(s, gamma=0.5, seed=s) for s in range(4)]
  rows += [row(s, gamma=1.0, seed=s) for s in (1, 2, 5)]
  rows[1]['metrics'] = {}
  rows[5]['metrics'] = {'heldout/loss': math.inf}
  pairs = paired.pair(rows, A, B)
  assert len(pairs.settings) == 0
  assert [left.words for left in pairs.unpaired] == [
    'gamma=0.5 at seed=0: the other arm has no such cell',
    'gamma=0.5 at seed=1: heldout/loss is missing or not finite',
    'gamma=0.5 at seed=2: heldout/loss of the other arm is missing or not '
    'finite',
    'gamma=0.5 at seed=3: the other arm has no such cell',
    'gamma=1.0 at seed=1: heldout/loss of the other arm is missing or not '
    'finite',
    'gamma=1.0 at seed=2: heldout/loss is missing or not finite',
    'gamma=1.0 at seed=5: the other arm has no such cell',
  ]


def test_arms_may_differ_in_several_keys():
  rows = [row(3.0 + s, gamma=1.0, lr=1e-3, seed=s) for s in range(2)]
  rows += [row(3.5 + s, gamma=0.5, lr=2e-3, seed=s) for s in range(2)]
  rows += [row(9.0, gamma=0.5, lr=1e-3, seed=0), row(4.0, rule='he', seed=0)]
  pairs = paired.pair(
    rows, A | {'opt.lr': 2e-3}, {'init.gamma': 1.0, 'opt.lr': 1e-3}
  )
  np.testing.assert_array_equal(pairs.b - pairs.a, [-0.5, -0.5])
  # A rule has no gamma: the key is absent in its cells.
  pairs = paired.pair(
    rows, {'init.rule': 'he'}, {'init.gamma': 1.0, 'opt.lr': 1e-3}
  )
  np.testing.assert_array_equal(pairs.a, [4.0])
  assert [left.setting for left in pairs.unpaired] == [{'seed': 1}]


@pytest.mark.parametrize(
  ('a', 'b', 'words'),
  [
    (A, A, 'both arms are gamma=0.5'),
    (A, {'init.gamma': 2.0}, 'no finished cell has gamma=2.0'),
    (A, B, 'two cells have gamma=1.0, seed=0'),
  ],
)
def test_bad_arms(a, b, words):
  rows = [row(1.0, gamma=gamma, seed=0) for gamma in (0.5, 1.0, 1.0)]
  with pytest.raises(errors.ConfigError, match=words):
    paired.pair(rows, a, b)


def test_sizes_are_compared_apart():
  rng = np.random.default_rng(0)
  rows = []
  for size, gain in (('tiny', 0.3), ('small', 0.1)):
    for seed in range(3):
      noise = rng.normal() * 0.05
      rows.append(row(4 + noise, gamma=0.5, size=size, seed=seed))
      rows.append(row(4 + noise - gain, gamma=1.0, size=size, seed=seed))
  rows.append(row(3.0, gamma=1.0, size='large', seed=0))
  tiny, small, large = paired.compare(rows, A, B)
  assert tiny.setting == {'size': 'tiny'} and tiny.difference.n == 3
  assert tiny.difference.mean == pytest.approx(-0.3)
  assert small.difference.mean == pytest.approx(-0.1)
  assert (large.setting, large.difference.n) == ({'size': 'large'}, 0)
  assert large.unpaired == [
    'gamma=1.0 at size=large, seed=0: the other arm has no such cell'
  ]


def test_rows_of_a_sweep(tmp_path):
  curve = tmp_path / 'metrics.jsonl'
  rows = [
    results.Row('a', 'done', A, {'heldout/loss': 3.0}, curve),
    results.Row('b', 'failed', B, {}, curve),
  ]
  assert paired.finished(rows) == [row(3.0, gamma=0.5)]


@pytest.mark.parametrize('confidence', [0.9, 0.95, 0.999])
@pytest.mark.parametrize('ratio', [0.3, 0.8, 1.0, 3.0, 20.0])
def test_seeds_needed_is_the_smallest_that_does(ratio, confidence):
  def half(n):
    low, high = stats.t.interval(confidence, n - 1, scale=0.1 / math.sqrt(n))
    return (high - low) / 2

  n = paired.seeds_needed(0.1, 0.1 / ratio, confidence)
  assert half(n) <= 0.1 / ratio and (n == 2 or half(n - 1) > 0.1 / ratio)


def test_seeds_needed_known_and_refused():
  # 1.96^2 = 3.84 pairs by the normal, 7 by the t distribution.
  assert paired.seeds_needed(0.01, 0.01) == 7
  assert paired.seeds_needed(0.0, 0.01) == 2
  for bad in ((-1, 1), (1, 0), (math.nan, 1), (1, 1, 1.0), (1, 1e-6)):
    with pytest.raises(errors.ConfigError):
      paired.seeds_needed(*bad)

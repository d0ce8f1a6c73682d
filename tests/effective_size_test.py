"""A known size multiplier is found again; out of range it is refused."""

import math

import numpy as np
import pytest

from gamma_jax import errors, results
from gamma_jax.analysis import effective_size, paired

SIZES = (1e6, 3e6, 1e7, 3e7, 1e8)
TRUE = 1.44


def curve(n):
  return 2 + 40 * n**-0.25


def ladder(rng, multiplier=TRUE, seeds=3, common=0.01, own=0.002):
  """Both arms; `common` is what a seed does to every cell of its own."""
  shift = rng.normal(0, common, seeds)
  return [
    {n: curve(factor * n) + shift + rng.normal(0, own, seeds) for n in SIZES}
    for factor in (1, multiplier)
  ]


@pytest.mark.parametrize('multiplier', [0.5, 1.0, TRUE, 3.0])
def test_known_multiplier_without_noise(multiplier):
  base, arm = ladder(np.random.default_rng(0), multiplier, 1, 0, 0)
  got = effective_size.effective_size(base, arm)
  for m in got.multipliers:
    assert m.multiplier == pytest.approx(multiplier, rel=1e-4)
    assert m.equal_size == pytest.approx(multiplier * m.size, rel=1e-4)
    assert m.extrapolated == (not 1e6 * 0.999 < m.equal_size < 1e8 * 1.001)
    assert math.isnan(m.interval[0]) and math.isnan(m.interval[1])
  assert [m.size for m in got.multipliers] == list(SIZES)
  assert (got.seeds, got.indicative) == (1, True)


@pytest.mark.parametrize(('seeds', 'draws'), [(2, 40), (3, 40), (5, 15)])
def test_interval_covers_the_truth(seeds, draws):
  covered, below, excludes_one = [], [], []
  for draw in range(draws):
    base, arm = ladder(np.random.default_rng(draw), seeds=seeds)
    got = effective_size.effective_size(base, arm, resamples=60)
    for m in got.multipliers:
      low, high = m.interval
      covered.append(low <= TRUE <= high)
      below.append(m.multiplier < TRUE)
      excludes_one.append(low > 1)
  # 95 % asked; the five sizes of a draw stand and fall together.
  assert 0.87 < np.mean(covered) < 0.995
  assert 0.3 < np.mean(below) < 0.7
  if seeds > 2:
    assert np.mean(excludes_one) > 0.9  # narrow enough to be of use


def test_interval_is_that_of_single_seeds_when_noise_is_small():
  # Then the multiplier is linear in the losses, and a seed's own is a sample.
  base, arm = ladder(np.random.default_rng(0), common=1e-4, own=1e-4)
  alone = [
    effective_size.effective_size(
      {n: v[seed : seed + 1] for n, v in base.items()},
      {n: v[seed : seed + 1] for n, v in arm.items()},
    ).multipliers
    for seed in range(3)
  ]
  together = effective_size.effective_size(base, arm, resamples=5000)
  for index, m in enumerate(together.multipliers):
    want = results.interval([math.log(a[index].multiplier) for a in alone])
    low, high = np.log(m.interval)
    assert (high - low) / 2 == pytest.approx(want.half, rel=0.05)
    assert (high + low) / 2 == pytest.approx(want.mean, abs=0.01 * want.half)


def test_what_a_seed_does_to_both_arms_cancels():
  rng = np.random.default_rng(0)
  base, arm = ladder(rng, common=0.02, own=0)
  shuffled = {n: losses[[1, 2, 0]] for n, losses in arm.items()}
  width = [
    np.diff(effective_size.effective_size(base, a).multipliers[2].interval)
    for a in (arm, shuffled)
  ]
  assert width[0] < width[1] / 5


def test_resampling_is_repeatable():
  base, arm = ladder(np.random.default_rng(0))
  one, two, other = (
    effective_size.effective_size(base, arm, resamples=20, rng_seed=seed)
    for seed in (0, 0, 1)
  )
  assert one.multipliers == two.multipliers
  assert one.multipliers[0].interval != other.multipliers[0].interval


def test_refusals_are_in_words():
  base, arm = ladder(np.random.default_rng(0), own=0)
  arm[1e6] = np.full(3, 1.9)
  arm[3e6] = base[1e8] * 0.9 + 0.1 * np.mean(base[1e8]) - 0.25
  arm[1e7] = base[1e6] + 1.0
  got = effective_size.effective_size(base, arm)
  floor, large, small, fine, _ = got.multipliers
  assert 'at or below the fitted floor' in floor.refused
  assert 'equal size' in large.refused and '2.5e+05 to 4e+08' in large.refused
  assert 'equal size' in small.refused
  for m in (floor, large, small):
    assert math.isnan(m.multiplier) and math.isnan(m.equal_size)
    assert np.isnan(m.interval).all() and not m.extrapolated
  assert fine.multiplier == pytest.approx(TRUE, rel=0.05) and not fine.refused


def test_interval_is_open_where_the_floor_is_near():
  rng = np.random.default_rng(1)
  base, arm = ladder(rng, common=0, own=0)
  noise = rng.normal(0, 0.002, (5, 3))
  base = {n: v + e for (n, v), e in zip(base.items(), noise, strict=True)}
  arm[1e8] = curve(3.5e8) + np.array([-0.5, 0.25, 0.25])
  last = effective_size.effective_size(base, arm).multipliers[-1]
  assert not last.refused and last.interval[1] == math.inf
  assert last.interval[0] < last.multiplier


@pytest.mark.parametrize(
  ('base', 'arm', 'words'),
  [
    ({n: [curve(n)] for n in SIZES[:2]}, {1e6: [3.0]}, 'three sizes or more'),
    ({n: [curve(n)] for n in SIZES}, {1e6: [3.0, 3.1]}, 'the same seeds'),
    ({n: [] for n in SIZES}, {1e6: []}, 'the same seeds'),
    ({n: [curve(n)] for n in SIZES}, {1e6: [math.nan]}, 'must be finite'),
  ],
)
def test_bad_input(base, arm, words):
  with pytest.raises(errors.ConfigError, match=words):
    effective_size.effective_size(base, arm)


def test_table_from_paired_arms():
  cells = [
    {
      'overrides': {'init.gamma': gamma, 'size': size, 'seed': seed},
      'metrics': {'heldout/loss': loss + gamma + 0.1 * seed},
    }
    for size, loss in (('s', 4.0), ('m', 3.0), ('l', 2.0))
    for gamma in (0.5, 1.0)
    for seed in ((2, 0, 1) if size != 'l' else (0, 2))
  ]
  pairs = paired.pair(cells, {'init.gamma': 0.5}, {'init.gamma': 1.0})
  parameters = {'s': 1e6, 'm': 1e7, 'l': 1e8}
  base, arm, left = effective_size.losses_by_size(pairs, parameters)
  assert base[1e6] == pytest.approx([4.5, 4.7])  # seeds 0 and 2
  assert arm[1e8] == pytest.approx([3.0, 3.2])
  assert left == [
    f'size={size}, seed=1: not every size has this seed' for size in 'sm'
  ]
  doubled = [{**c, 'overrides': c['overrides'] | {'eps': 1}} for c in cells]
  pairs = paired.pair(cells + doubled, {'init.gamma': 0.5}, {'init.gamma': 1.0})
  with pytest.raises(errors.ConfigError, match='two pairs have size=s, seed=2'):
    effective_size.losses_by_size(pairs, parameters)

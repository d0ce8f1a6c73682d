"""L(N) = E + A N^-a is found again, and bad fits say so."""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from gamma_jax import errors
from gamma_jax.analysis import power_law

SIZES = (1e6, 3e6, 1e7, 3e7, 1e8)


def curve(n, floor=2.0, scale=40.0, exponent=0.25):
  return floor + scale * n**-exponent


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
  st.floats(0.1, 4), st.floats(0.05, 2), st.floats(0.05, 1), st.floats(2, 9)
)
def test_a_known_curve_is_found(floor, scale, exponent, decade):
  sizes = [10**decade * step for step in (1, 3, 10, 30, 100)]
  losses = {n: floor + scale * (n / sizes[2]) ** -exponent for n in sizes}
  law = power_law.fit(losses)
  assert law.exponent == pytest.approx(exponent, rel=1e-3)
  assert law.floor == pytest.approx(floor, rel=1e-3, abs=1e-3)
  # Where it was not fitted.
  assert law.loss(1.7 * sizes[2]) == pytest.approx(
    floor + scale * 1.7**-exponent, abs=1e-5
  )
  np.testing.assert_allclose(law.residuals, 0, atol=1e-5)


def test_size_and_loss_are_inverse():
  law = power_law.fit({n: curve(n) for n in SIZES})
  assert law.scale == pytest.approx(40 * math.prod(SIZES) ** (-0.25 / 5))
  sizes = np.array([5e5, 2e7, 3e8])
  np.testing.assert_allclose(np.exp(law.log_size(law.loss(sizes))), sizes)
  assert law.log_size(law.floor) == law.log_size(law.floor - 1) == math.inf


def test_residuals_are_loss_minus_fit():
  noise = np.array([1, -2, 2, -2, 1]) * 1e-3
  losses = {n: curve(n) + e for n, e in zip(SIZES, noise, strict=True)}
  law = power_law.fit(losses)
  np.testing.assert_allclose(
    law.residuals,
    [loss - law.loss(n) for n, loss in losses.items()],
    atol=1e-12,
  )
  assert law.rms == pytest.approx(math.sqrt(np.square(law.residuals).sum() / 2))
  assert 1e-3 < law.rms < 3e-3 and not law.warnings


def test_a_point_with_a_large_stderr_is_let_go():
  losses = {n: curve(n) for n in (*SIZES, 2e8)}
  losses[1e7] += 0.05
  stderr = dict.fromkeys(losses, 1e-3)
  assert abs(power_law.fit(losses).floor - 2) > 1e-2
  # Only the ratio counts.
  for unit in (1e-6, 1.0):
    weighted = {n: unit * (100 if n == 1e7 else 1) for n in stderr}
    law = power_law.fit(losses, weighted)
    assert law.floor == pytest.approx(2, abs=1e-3)
    assert law.residuals[2] == pytest.approx(0.05, rel=0.01)


@pytest.mark.parametrize(
  ('loss', 'words'),
  [
    (lambda n: 40 * n**-0.1, 'E is at its bound 0'),
    (lambda n: 6 - 0.3 * math.log10(n), 'E is at its bound 0'),
    (lambda n: 3 + (n < 2e6) + 0.05 * (n > 5e6), 'E is at the lowest loss'),
    (lambda n: 3.0 + (n < 2e6), 'a is at its bound 3'),
  ],
)
def test_bounds_are_said(loss, words):
  law = power_law.fit({n: loss(n) for n in SIZES})
  assert any(words in warning for warning in law.warnings), law
  assert 0 <= law.floor <= min(loss(n) for n in SIZES)


def test_three_sizes_leave_nothing_to_test():
  law = power_law.fit({n: curve(n) for n in SIZES[:3]})
  assert law.floor == pytest.approx(2) and math.isnan(law.rms)
  assert law.warnings == [
    'three sizes fix the curve: nothing is left to test it'
  ]


@pytest.mark.parametrize(
  ('losses', 'stderr', 'words'),
  [
    ({1e6: 3.0, 1e7: 2.0}, None, 'three sizes or more, got 2'),
    ({n: 3.0 for n in SIZES}, None, 'does not fall'),
    ({n: math.log(n) for n in SIZES}, None, 'does not fall'),
    ({n: math.nan for n in SIZES}, None, 'positive and finite'),
    ({n - 1e6: 1.0 for n in SIZES}, None, 'positive and finite'),
    ({n: curve(n) for n in SIZES}, {1e6: 1.0}, 'stderr must be positive'),
    ({n: curve(n) for n in SIZES}, dict.fromkeys(SIZES, 0), 'stderr must be'),
  ],
)
def test_bad_input(losses, stderr, words):
  with pytest.raises(errors.ConfigError, match=words):
    power_law.fit(losses, stderr)

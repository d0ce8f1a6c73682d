"""Condensation metrics against float64, closed forms and known traps."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gamma_jax import shapes
from gamma_jax.analysis import condensation
from tests.matrices import (
  gaussian,
  reference_cosines,
  reference_stable_rank,
)

METRICS = jax.jit(condensation.matrix_metrics, static_argnums=1)


def power_law(rows, columns):
  """Singular values 1, 1/2, 1/3, ..., as of a trained matrix."""
  u, _, v = np.linalg.svd(gaussian(rows, columns), full_matrices=False)
  return (u / np.arange(1, len(v) + 1, dtype=np.float32)) @ v


@pytest.mark.parametrize(
  'w, rtol',
  [
    # The top of a Gaussian spectrum is dense: the hardest case there is.
    (gaussian(64, 256), 1e-4),
    (gaussian(256, 64), 1e-4),
    (gaussian(400, 400), 2e-3),
    (gaussian(3, 700), 1e-5),
    (gaussian(1, 5), 1e-5),
    (power_law(200, 120), 1e-5),
    (gaussian(100, 80) * 0.05 + np.ones((100, 80), np.float32), 1e-5),
    (np.diag(np.r_[2.0, np.ones(63)]).astype(np.float32), 1e-5),
  ],
)
def test_stable_rank_equals_svd(w, rtol):
  got = METRICS(w)['stable_rank']
  np.testing.assert_allclose(got, reference_stable_rank(w), rtol=rtol)


def test_stable_rank_is_deterministic():
  w = gaussian(48, 80)
  assert METRICS(w)['stable_rank'] == METRICS(w.copy())['stable_rank']


@pytest.mark.parametrize('scale', [1.0, 1e-6, 1e-30, 1e30])
def test_scale_changes_the_norm_only(scale):
  w = gaussian(48, 80)
  small = METRICS(w * np.float32(scale))
  whole = METRICS(w)
  for name in ('stable_rank', 'mean_abs_cosine', 'cluster_share'):
    np.testing.assert_allclose(small[name], whole[name], rtol=1e-5)
  np.testing.assert_allclose(
    small['frobenius'], scale * whole['frobenius'], rtol=1e-5
  )


@pytest.mark.parametrize('scale', [1.0, 1e-6])
def test_rank_one_is_condensed(scale):
  w = scale * np.outer(gaussian(48), gaussian(80, seed=1))
  w = w.astype(np.float32)
  got = METRICS(w)
  for name in ('stable_rank', 'mean_abs_cosine', 'cluster_share'):
    np.testing.assert_allclose(got[name], 1.0, rtol=1e-5)
  np.testing.assert_allclose(condensation.effective_rank(w), 1.0, rtol=1e-5)
  assert condensation.largest_component_share(w) == 1.0


def test_orthogonal_rows_are_not():
  w = np.linalg.qr(gaussian(80, 80))[0][:48]
  got = METRICS(w)
  np.testing.assert_allclose(got['stable_rank'], 48, rtol=1e-5)
  np.testing.assert_allclose(got['mean_abs_cosine'], 0, atol=1e-6)
  np.testing.assert_allclose(got['cluster_share'], 1 / 48, rtol=1e-6)
  np.testing.assert_allclose(condensation.effective_rank(w), 48, rtol=1e-5)


def test_zero_matrix_is_zero_and_nan_stays_nan():
  zero = np.zeros((5, 7), np.float32)
  assert all(value == 0 for value in METRICS(zero).values())
  assert condensation.effective_rank(zero) == 0
  assert condensation.largest_component_share(zero) == 0
  w = gaussian(5, 7)
  w[2, 3] = np.nan
  assert all(np.isnan(value) for value in METRICS(w).values())


def test_zero_rows_are_left_out():
  w = gaussian(6, 4)
  w[1] = w[4] = 0
  cosine, share = reference_cosines(w[[0, 2, 3, 5]])
  got = METRICS(w)
  np.testing.assert_allclose(got['mean_abs_cosine'], cosine, rtol=1e-5)
  np.testing.assert_allclose(got['cluster_share'], share, rtol=1e-6)


def test_random_matrix_sits_at_the_random_values():
  w = gaussian(512, 2048)
  got = METRICS(w)
  np.testing.assert_allclose(
    got['stable_rank'], condensation.random_stable_rank(512, 2048), rtol=0.03
  )
  np.testing.assert_allclose(
    got['mean_abs_cosine'],
    condensation.random_mean_abs_cosine(2048),
    rtol=0.01,
  )
  np.testing.assert_allclose(got['cluster_share'], 1 / 512, rtol=1e-6)


def test_random_cosine_in_the_plane_and_at_large_width():
  # Uniform angle: the mean of |cos| is 2 / pi.
  np.testing.assert_allclose(
    condensation.random_mean_abs_cosine(2), 2 / np.pi, rtol=1e-12
  )
  np.testing.assert_allclose(
    condensation.random_mean_abs_cosine(4096),
    np.sqrt(2 / (np.pi * 4096)),
    rtol=1e-4,
  )


def test_duplicate_and_opposed_rows_form_a_cluster():
  w = gaussian(20, 400)
  w[[3, 7, 11]] = w[0]
  w[15] = -2 * w[0]
  cosine, share = reference_cosines(w)
  got = METRICS(w)
  assert share == 5 / 20
  np.testing.assert_allclose(got['cluster_share'], share, rtol=1e-6)
  np.testing.assert_allclose(got['mean_abs_cosine'], cosine, rtol=1e-5)
  assert condensation.largest_component_share(w) == 5 / 20


def fan(*degrees):
  """One unit row a direction, in the plane."""
  angles = np.deg2rad(degrees)
  return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def test_components_chain_where_clusters_do_not():
  # Cosine of 45 degrees is 0.707, of 46 it is 0.695: the threshold is 0.7.
  w = fan(0, 40, 80, 126)
  assert condensation.largest_component_share(w) == 3 / 4
  np.testing.assert_allclose(METRICS(w)['cluster_share'], 3 / 4, rtol=1e-6)
  w = fan(0, 45, 90, 135 + 4)
  assert condensation.largest_component_share(w) == 1
  np.testing.assert_allclose(METRICS(w)['cluster_share'], 3 / 4, rtol=1e-6)


def test_subsample_is_every_nth_row():
  w = gaussian(64, 32)
  w[1::4] = w[1]  # never taken at 16 of 64
  cosine, share = reference_cosines(w[::4])
  got = METRICS(w, 16)
  np.testing.assert_allclose(got['mean_abs_cosine'], cosine, rtol=1e-5)
  np.testing.assert_allclose(got['cluster_share'], share, rtol=1e-6)
  # The stable rank takes all rows.
  np.testing.assert_allclose(
    got['stable_rank'], reference_stable_rank(w), rtol=1e-4
  )


def test_effective_rank_closed_form_and_svd():
  w = np.diag([3.0, 1.0, 0.0])
  p = np.array([0.75, 0.25])
  np.testing.assert_allclose(
    condensation.effective_rank(w), np.exp(-np.sum(p * np.log(p))), rtol=1e-12
  )
  stack = np.stack([power_law(30, 50), gaussian(30, 50), np.zeros((30, 50))])
  s = np.linalg.svd(stack[:2].astype(np.float64), compute_uv=False)
  p = s / s.sum(axis=1, keepdims=True)
  want = [*np.exp(-np.sum(p * np.log(p), axis=1)), 0.0]
  got = condensation.effective_rank(stack)
  np.testing.assert_allclose(got, want, rtol=1e-6)
  flipped = condensation.effective_rank(stack.swapaxes(1, 2))
  np.testing.assert_allclose(flipped, want, rtol=1e-6)


def test_transposition_trap():
  # A Flax kernel (in, out) all of whose output neurons listen to input 0: its
  # columns are aligned, its rows are not.
  kernel = 0.01 * gaussian(80, 48)
  kernel[0] = np.where(np.arange(48) % 2, 1.0, -1.0)
  kernel = jnp.asarray(kernel, jnp.float32)
  w = condensation.as_matrix(kernel, shapes.weight_axes('BD,DF->BF'))
  assert w.shape == (48, 80)
  np.testing.assert_allclose(METRICS(w)['cluster_share'], 1, rtol=1e-6)
  assert METRICS(w)['mean_abs_cosine'] > 0.9
  # What the trap would report.
  np.testing.assert_allclose(METRICS(kernel)['cluster_share'], 1 / 80)
  assert METRICS(kernel)['mean_abs_cosine'] < 0.2


def test_as_matrix_orders_batch_out_in():
  kernel = jnp.arange(2 * 3 * 4 * 5, dtype=jnp.float32).reshape(2, 3, 4, 5)
  # Output matrix N, H, D with a layer axis.
  axes = shapes.Axes(in_axis=(1, 2), out_axis=3, batch_axis=0)
  got = condensation.as_matrix(kernel, axes)
  assert got.shape == (2, 5, 12)
  assert got[1, 4, 2 * 4 + 3] == kernel[1, 2, 3, 4]
  # Query kernel D, N, H, one matrix a head.
  axes = shapes.Axes(in_axis=1, out_axis=-1, batch_axis=(0, 2))
  got = condensation.as_matrix(kernel, axes)
  assert got.shape == (2, 4, 5, 3)
  assert got[1, 3, 4, 2] == kernel[1, 2, 3, 4]
  with pytest.raises(ValueError, match='exactly once'):
    condensation.as_matrix(kernel, shapes.Axes(0, 1))


def test_dense_kernel_of_flax_is_in_out():
  kernel = nn.Dense(5).init(jax.random.key(0), jnp.ones((1, 3)))['params']
  w = condensation.as_matrix(kernel['kernel'], shapes.Axes(0, 1))
  assert w.shape == (5, 3)  # neurons, inputs


def test_ordered_cosines_put_clusters_beside_one_another():
  a, b = np.eye(2, 6)
  w = np.stack([a, b, -a, 2 * a, b, 0 * a, -3 * a])
  got = condensation.ordered_cosines(w)
  np.testing.assert_allclose(np.diag(got), 1)
  signs = got[0]  # a and -a are the larger group, at the two ends
  assert sorted(signs.tolist()) == [-1, -1, 0, 0, 1, 1]
  ends = [0, 1, 4, 5]
  np.testing.assert_allclose(np.abs(got[np.ix_(ends, ends)]), 1)
  np.testing.assert_allclose(got[2:4, 2:4], 1)

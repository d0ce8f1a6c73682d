"""Routing: choice, weights, ties, and losses against closed forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gamma_jax import route


def normal(*shape, seed=0):
  x = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(x, jnp.float32)


@functools.partial(jax.jit, static_argnums=1)
def stats(logits, k, mask=None):
  if mask is None:
    mask = jnp.ones(logits.shape[:-1], bool)
  _, experts = route.route(logits, k)
  return route.router_stats(logits, experts, mask)


@pytest.mark.parametrize('k', [1, 2, 5, 8])
def test_chooses_the_largest_logits_best_first(k):
  logits = normal(3, 7, 8)
  weights, experts = route.route(logits, k)
  want = np.argsort(-np.asarray(logits), axis=-1)[..., :k]
  np.testing.assert_array_equal(experts, want)
  assert experts.dtype == jnp.int32 and weights.dtype == jnp.float32


def test_weights_are_probabilities_over_all_divided_by_the_chosen():
  logits = normal(2, 5, 6) * 3
  weights, experts = route.route(logits, 3)
  x = np.asarray(logits, np.float64)
  probs = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
  chosen = np.take_along_axis(probs, np.asarray(experts), -1)
  want = chosen / chosen.sum(-1, keepdims=True)
  np.testing.assert_allclose(weights, want, rtol=1e-5)


def test_a_single_choice_still_tells_the_router_something():
  logits = normal(1, 5, 6)
  weights, _ = route.route(logits, 1)
  want = np.asarray(jax.nn.softmax(logits)).max(-1, keepdims=True)
  np.testing.assert_allclose(weights, want, rtol=1e-6)
  grad = jax.grad(lambda x: jnp.sum(route.route(x, 1)[0]))(logits)
  assert np.abs(np.asarray(grad)).max() > 0.01


@pytest.mark.parametrize('k', [1, 2, 3, 4])
@pytest.mark.parametrize('E', [4, 6, 16])
def test_equal_logits_are_spread_evenly(E, k):
  _, experts = route.route(jnp.zeros((2, 240, E)), k)
  for row in np.asarray(experts):
    load = np.bincount(row.ravel(), minlength=E)
    assert load.max() - load.min() <= k
    assert all(len(set(choice)) == k for choice in row)


def test_ties_do_not_depend_on_the_row_of_the_batch():
  # Accumulation deals the rows out anew and must not change the routing.
  _, experts = route.route(jnp.zeros((3, 10, 8)), 2)
  np.testing.assert_array_equal(experts[0], experts[2])


def test_the_smallest_difference_decides():
  logits = jnp.zeros((1, 64, 8)).at[..., 5].set(1e-30).at[..., 2].set(1e-35)
  _, experts = route.route(logits, 2)
  np.testing.assert_array_equal(experts[..., 0], 5)
  np.testing.assert_array_equal(experts[..., 1], 2)


def test_bias_moves_the_choice_but_not_the_weights():
  logits = normal(1, 50, 4)
  bias = jnp.array([0.0, 0.0, 0.0, 10.0])
  weights, experts = route.route(logits, 2, bias)
  np.testing.assert_array_equal(experts[..., 0], 3)
  probs = np.asarray(jax.nn.softmax(logits))
  chosen = np.take_along_axis(probs, np.asarray(experts), -1)
  want = chosen / chosen.sum(-1, keepdims=True)
  np.testing.assert_allclose(weights, want, rtol=1e-5)
  grad = jax.grad(lambda b: route.route(logits, 2, b)[0].sum())(bias)
  np.testing.assert_array_equal(grad, 0)


# --- Losses ------------------------------------------------------------------


def test_balance_is_exactly_one_when_even():
  assert float(stats(jnp.zeros((4, 64, 8)), 2).balance) == 1.0


@pytest.mark.parametrize('k', [1, 2])
def test_balance_of_a_collapsed_router(k):
  # All tokens to the same k experts, each with probability 1/k: E / k.
  logits = jnp.full((1, 32, 8), -1e9).at[..., :k].set(0.0)
  assert float(stats(logits, k).balance) == pytest.approx(8 / k)


def test_balance_takes_probabilities_over_all_experts():
  logits = normal(3, 40, 8)
  got = stats(logits, 2)
  x = np.asarray(logits, np.float64).reshape(-1, 8)
  P = (np.exp(x) / np.exp(x).sum(-1, keepdims=True)).mean(0)
  top = np.argsort(-x, axis=-1)[:, :2]
  f = np.bincount(top.ravel(), minlength=8) / top.size
  assert float(got.balance) == pytest.approx(8 * (f * P).sum(), rel=1e-5)
  np.testing.assert_array_equal(got.load, np.bincount(top.ravel(), minlength=8))
  assert int(got.tokens) == 120


def test_balance_gradient_pushes_the_full_expert_down():
  logits = normal(1, 64, 4) * 0.01 + jnp.array([[[0.1, 0.0, 0.0, 0.0]]])
  grad = jax.grad(lambda x: stats(x, 1).balance)(logits)
  assert float(grad[..., 0].sum()) > 0 > float(grad[..., 1:].sum())


def test_z_is_the_summed_square_of_logsumexp():
  logits = normal(2, 9, 5) * 4
  want = np.log(np.exp(np.asarray(logits, np.float64)).sum(-1)) ** 2
  assert float(stats(logits, 2).z_sum) == pytest.approx(want.sum(), rel=1e-5)


def losses(logits, mask):
  got = stats(logits, 2, mask)
  return got.balance + got.z_sum


def test_padding_counts_nowhere():
  logits = normal(2, 12, 4)
  mask = jnp.arange(12)[None] < jnp.array([[12], [5]])
  # A finite and a NaN padding must both leave no trace.
  for junk in (50.0, np.nan):
    dirty = jnp.where(mask[..., None], logits, junk)
    got = stats(dirty, 2, mask)
    real = jnp.concatenate([logits[0], logits[1, :5]])[None]
    want = stats(real, 2)
    for a, b in zip(got, want):
      np.testing.assert_allclose(a, b, rtol=1e-5)
    grad = jax.jit(jax.grad(losses))(dirty, mask)
    assert np.all(np.asarray(grad[1, 5:]) == 0)


def test_an_empty_batch_gives_zeros():
  got = stats(normal(1, 4, 4), 2, jnp.zeros((1, 4), bool))
  assert float(got.balance) == 0 and int(got.tokens) == 0


# --- Load --------------------------------------------------------------------


def test_load_metrics_by_hand():
  load = jnp.array([[6, 2, 0, 0], [2, 2, 2, 2]])
  got = route.load_metrics(load)
  assert float(got['max_load']) == pytest.approx((3 + 1) / 2)
  assert float(got['dead_experts']) == pytest.approx(2 / 8)
  h = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) / np.log(4)
  assert float(got['load_entropy']) == pytest.approx((h + 1) / 2)


def test_balancing_bias_moves_against_the_load():
  bias = route.balanced_bias(jnp.zeros((1, 4)), jnp.array([[6, 4, 4, 2]]), 0.1)
  np.testing.assert_allclose(bias, [[-0.1, 0, 0, 0.1]])


def test_balancing_bias_evens_out_a_lopsided_router():
  logits = normal(1, 512, 8) + jnp.linspace(0, 2, 8)[None, None]
  bias = jnp.zeros(8)
  before = stats(logits, 2).load

  @jax.jit
  def update(bias):
    _, experts = route.route(logits, 2, bias)
    load = jnp.bincount(experts.reshape(-1), length=8)
    return route.balanced_bias(bias, load, 0.005), load

  for _ in range(200):
    bias, load = update(bias)
  mean = 512 * 2 / 8
  assert before.max() > 1.7 * mean and load.max() < 1.15 * mean

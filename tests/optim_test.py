"""Schedules, decay groups and optimizer arithmetic."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gamma_jax import optim
from gamma_jax.config import OptConfig

PARAMS = {
  'embed': {'embedding': jnp.ones((4, 3))},
  'blocks': {
    'norm': {'scale': jnp.ones((2, 3))},
    'q': {'kernel': jnp.ones((3, 3))},
  },
}


def rates(config, steps, n):
  shape = optim.schedule_shape(config, steps)
  return np.array([float(shape(i)) for i in range(n)])


def test_zero_gradients_move_exactly_the_decayed_leaves():
  config = OptConfig(warmup_steps=0, schedule='constant')
  tx = optim.make_optimizer(config, 10, lr=0.1, weight_decay=0.1)
  zeros = jax.tree.map(jnp.zeros_like, PARAMS)
  updates, _ = tx.update(zeros, tx.init(PARAMS), PARAMS)
  np.testing.assert_allclose(updates['embed']['embedding'], -0.01, rtol=1e-6)
  np.testing.assert_allclose(updates['blocks']['q']['kernel'], -0.01, rtol=1e-6)
  assert not np.any(updates['blocks']['norm']['scale'])


def test_an_uncovered_leaf_is_an_error():
  with pytest.raises(ValueError, match='q/lora'):
    optim.decay_mask({'q': {'lora': jnp.ones(3)}})


def test_first_update_is_adamw_in_closed_form():
  config = OptConfig(warmup_steps=4, schedule='constant', clip=0.0)
  tx = optim.make_optimizer(config, 10, lr=0.2, weight_decay=0.5)
  grads = jax.tree.map(lambda x: 3.0 * x, PARAMS)
  updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
  # Bias-corrected Adam takes a unit step first; the rate is lr/4.
  want = -0.05 * (1.0 + 0.5)
  np.testing.assert_allclose(updates['blocks']['q']['kernel'], want, rtol=1e-6)


def test_clip_acts_once_on_the_global_norm():
  config = OptConfig(warmup_steps=0, schedule='constant', clip=1.0)
  grads = jax.tree.map(lambda x: 100.0 * x, PARAMS)
  tx = optim.make_optimizer(config, 10, lr=1.0, weight_decay=0.0)
  _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
  mu = optax.tree.get(state, 'mu')
  # mu = (1 - b1) * clipped gradient, whose norm is 1.
  norm = float(optax.tree.norm(mu)) / 0.1
  assert norm == pytest.approx(1.0, rel=1e-5)


def test_warmup_then_cosine_to_the_final_fraction():
  got = rates(OptConfig(warmup_steps=10, final_lr_fraction=0.1), 100, 130)
  np.testing.assert_allclose(got[:10], np.arange(1, 11) / 10, rtol=1e-5)
  half = 0.1 + 0.9 * 0.5  # the middle of the cosine
  assert got[54] == pytest.approx(half, rel=1e-4)
  np.testing.assert_allclose(got[99:], 0.1, rtol=1e-5)


def test_wsd_holds_and_then_decays_linearly():
  config = OptConfig(
    warmup_steps=10,
    schedule='wsd',
    wsd_decay_fraction=0.2,
    final_lr_fraction=0.0,
  )
  got = rates(config, 100, 110)
  np.testing.assert_allclose(got[9:80], 1.0, rtol=1e-6)
  assert got[89] == pytest.approx(0.5, rel=1e-5)
  np.testing.assert_allclose(got[99:], 0.0, atol=1e-6)


@pytest.mark.parametrize('schedule', ['cosine', 'wsd', 'constant'])
def test_stopping_early_does_not_change_the_schedule(schedule):
  config = OptConfig(warmup_steps=5, schedule=schedule)
  fixed = dataclasses.replace(config, schedule_steps=1000)
  np.testing.assert_array_equal(rates(config, 1000, 50), rates(fixed, 50, 50))


@pytest.mark.parametrize('warmup, steps', [(10, 10), (0, 1), (20, 10)])
@pytest.mark.parametrize('schedule', ['cosine', 'wsd', 'constant'])
def test_edges_are_finite(schedule, warmup, steps):
  config = OptConfig(warmup_steps=warmup, schedule=schedule)
  got = rates(config, steps, 30)
  assert np.all(np.isfinite(got)) and np.all(got >= 0) and got[0] > 0


def test_traced_rate_and_decay_equal_python_numbers():
  config = OptConfig(warmup_steps=2)
  grads = jax.tree.map(lambda x: 0.3 * x, PARAMS)

  def first_update(lr, wd):
    tx = optim.make_optimizer(config, 10, lr, wd)
    return tx.update(grads, tx.init(PARAMS), PARAMS)[0]

  fixed = first_update(0.01, 0.1)
  traced = jax.jit(first_update)(0.01, 0.1)
  for a, b in zip(jax.tree.leaves(fixed), jax.tree.leaves(traced)):
    np.testing.assert_allclose(a, b, rtol=1e-6)

"""Every dispatch against the experts applied one by one in NumPy."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gamma_jax import dispatch

M, D, F, E = 70, 12, 20, 5
BLOCK = 8
NAMES = ('blocks', 'ragged', 'dense')


def inputs(k, assign, gated, seed=0):
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape) * shape[-2] ** -0.5, jnp.float32)

  experts = {
    'mixed': np.stack([rng.permutation(E)[:k] for _ in range(M)]),
    'some empty': np.stack([rng.permutation([1, 3])[:k] for _ in range(M)]),
    'all to one': np.full((M, k), 2),
    'all to the last': np.full((M, k), E - 1),
  }[assign]
  kernels = dispatch.Kernels(
    normal(E, D, F), normal(E, D, F) if gated else None, normal(E, F, D)
  )
  weights = jnp.asarray(rng.uniform(0.1, 1, (M, k)), jnp.float32)
  return (
    normal(M, D) * M**0.5,
    weights,
    jnp.asarray(experts, jnp.int32),
    kernels,
  )


def reference(x, weights, experts, kernels):
  """float64, one choice at a time."""
  x, weights = np.asarray(x, np.float64), np.asarray(weights, np.float64)
  out = np.zeros_like(x)
  for m in range(len(x)):
    for w, e in zip(weights[m], np.asarray(experts[m])):
      if not 0 <= e < len(kernels.up):
        continue
      up = x[m] @ np.asarray(kernels.up[e], np.float64)
      if kernels.gate is None:
        h = 0.5 * up * (1 + np.vectorize(math.erf)(up / 2**0.5))
      else:
        gate = x[m] @ np.asarray(kernels.gate[e], np.float64)
        h = gate / (1 + np.exp(-gate)) * up
      out[m] += w * (h @ np.asarray(kernels.down[e], np.float64))
  return out


@functools.partial(jax.jit, static_argnums=0)
def value_and_grads(name, x, weights, experts, kernels):
  def total(x, weights, kernels):
    y = dispatch.apply_experts(
      x, weights, experts, kernels, implementation=name, block=BLOCK
    )
    # A curved loss, so that every cotangent differs.
    return jnp.sum(jnp.sin(y)), y

  grads, y = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(
    x, weights, kernels
  )
  return y, grads


def close(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    x, y = np.asarray(x), np.asarray(y)
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(y).max())


@pytest.mark.parametrize('gated', [True, False], ids=['swiglu', 'gelu'])
@pytest.mark.parametrize(
  'assign', ['mixed', 'some empty', 'all to one', 'all to the last']
)
@pytest.mark.parametrize('k', [1, 2])
def test_all_ways_agree_in_value_and_gradient(k, assign, gated):
  args = inputs(k, assign, gated)
  dense, dense_grads = value_and_grads('dense', *args)
  close(dense, reference(*args))
  for name in ('blocks', 'ragged'):
    y, grads = value_and_grads(name, *args)
    close(y, dense)
    close(grads, dense_grads)


@pytest.mark.parametrize('name', NAMES)
def test_choices_of_experts_elsewhere_add_nothing(name):
  # What a device sees that holds only some of the experts.
  x, weights, experts, kernels = inputs(2, 'mixed', True)
  experts = experts - 2  # -2, -1 and 3 .. are others' now
  kernels = jax.tree.map(lambda w: w[:2], kernels)
  y, grads = value_and_grads(name, x, weights, experts, kernels)
  close(y, reference(x, weights, experts, kernels))
  dense, dense_grads = value_and_grads('dense', x, weights, experts, kernels)
  close(grads, dense_grads)
  outside = (np.asarray(experts) < 0) | (np.asarray(experts) >= 2)
  assert np.all(np.asarray(grads[1])[outside] == 0)


@pytest.mark.parametrize('block', [1, 7, 64, 4096])
def test_block_size_changes_nothing(block):
  run = jax.jit(
    dispatch.apply_experts, static_argnames=('implementation', 'block')
  )
  args = inputs(2, 'mixed', True)
  close(
    run(*args, implementation='blocks', block=block),
    run(*args, implementation='dense', block=block),
  )


@pytest.mark.parametrize('name', NAMES)
def test_half_precision_in_half_precision_out(name):
  x, weights, experts, kernels = jax.tree.map(
    lambda a: a.astype('bfloat16') if a.dtype == jnp.float32 else a,
    inputs(2, 'mixed', True),
  )
  y, grads = value_and_grads(name, x, weights, experts, kernels)
  assert {str(a.dtype) for a in jax.tree.leaves((y, grads))} == {'bfloat16'}
  want = reference(x, weights, experts, kernels)
  error = np.abs(np.asarray(y, np.float64) - want).max()
  assert 0 < error < 0.05 * np.abs(want).max()


def test_unknown_name_is_an_error():
  with pytest.raises(ValueError, match='scatter'):
    dispatch.apply_experts(
      *inputs(1, 'mixed', False), implementation='scatter', block=8
    )

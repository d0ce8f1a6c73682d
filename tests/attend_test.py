"""Rotary embedding and blocked attention against dense float64 NumPy."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding

from gamma_jax import attend as lib
from tests import reference

B, T, N, K, H = 2, 11, 4, 2, 8


def inputs(T=T, K=K, dtype=jnp.float32, seed=0):
  keys = jax.random.split(jax.random.key(seed), 3)
  return tuple(
    jax.random.normal(key, (B, T, heads, H), dtype)
    for key, heads in zip(keys, (N, K, K), strict=True)
  )


def packed(T=T):
  """Row 0: two documents, the second starts last. Row 1: padding around."""
  segments = np.ones((B, T), np.int32)
  segments[0, -1] = 2
  segments[1, :2] = 0
  segments[1, T // 2 :] = 3
  segments[1, -2:] = 0
  return segments


@functools.partial(jax.jit, static_argnames='block')
def attend(q, k, v, segments, *, block):
  return lib.attend(q, k, v, segments, block=block)


def gradients(qkv, segments, block, weight=None):
  """Of sum(weight * output), for q, k and v."""
  weight = jnp.ones(qkv[0].shape) if weight is None else weight

  def total(qkv):
    out = attend(*qkv, segments, block=block).astype(jnp.float32)
    return jnp.sum(out * weight)

  return jax.grad(total)(qkv)


@pytest.mark.parametrize(
  ('block', 'kv_heads'), [(1, K), (3, K), (T, K), (T + 5, K), (3, 1), (3, N)]
)
def test_equals_dense_float64(block, kv_heads):
  q, k, v = inputs(K=kv_heads)
  got = attend(q, k, v, packed(), block=block)
  want = reference.attend(q, k, v, packed())
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=B * T, max_size=B * T))
def test_any_packing(segments):
  segments = np.array(segments, np.int32).reshape(B, T)
  got = attend(*inputs(), segments, block=3)
  want = reference.attend(*inputs(), segments)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('block', [1, 3, T])
def test_gradients_do_not_depend_on_the_block(block):
  weight = jax.random.normal(jax.random.key(9), (B, T, N, H))
  whole = gradients(inputs(), packed(), T + 5, weight)
  parts = gradients(inputs(), packed(), block, weight)
  for a, b in zip(whole, parts, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_gradient_equals_differences_of_the_reference():
  # Along one direction at a time, in float64, so the step may be small.
  qkv = inputs()
  weight = np.asarray(jax.random.normal(jax.random.key(9), (B, T, N, H)))
  grads = gradients(qkv, packed(), 3, weight)
  for i, grad in enumerate(grads):
    step = np.random.default_rng(i).normal(size=grad.shape)

    def value(sign, i=i, step=step):
      moved = [np.asarray(x, np.float64) for x in qkv]
      moved[i] = moved[i] + sign * 1e-5 * step
      return (reference.attend(*moved, packed()) * weight).sum()

    want = (value(1) - value(-1)) / 2e-5
    assert (grad * step).sum() == pytest.approx(want, rel=1e-4)


def test_grouped_heads_equal_repeated_heads():
  q, k, v = inputs()
  got = attend(q, k, v, packed(), block=3)
  k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
  np.testing.assert_allclose(
    got, attend(q, k, v, packed(), block=3), rtol=1e-6, atol=1e-7
  )


@pytest.mark.parametrize('block', [1, 4, T])
@pytest.mark.parametrize('t', [0, 5, T - 1])
def test_causal_by_gradient(block, t):
  """Output t reads v of exactly 0..t, and k of no later position."""
  weight = jnp.zeros((B, T, N, H)).at[:, t].set(1.0)
  segments = np.ones((B, T), np.int32)
  _, dk, dv = gradients(inputs(), segments, block, weight)
  reads_v = np.abs(dv).max(axis=(2, 3)) > 0
  np.testing.assert_array_equal(reads_v, np.tile(np.arange(T) <= t, (B, 1)))
  assert not np.any(dk[:, t + 1 :])


@pytest.mark.parametrize('block', [1, 3, T])
def test_documents_are_isolated_bitwise(block):
  segments = np.repeat([[1, 2]], B, axis=0).repeat([5, T - 5], axis=1)
  qkv = inputs()
  other = tuple(
    x.at[:, :5].set(1e3 * y[:, :5])
    for x, y in zip(qkv, inputs(seed=1), strict=True)
  )
  a = attend(*qkv, segments, block=block)
  b = attend(*other, segments, block=block)
  np.testing.assert_array_equal(a[:, 5:], b[:, 5:])
  assert not np.array_equal(a[:, :5], b[:, :5])


@pytest.mark.parametrize(
  ('block', 'dtype'), [(1, 'float32'), (3, 'bfloat16'), (T, 'float32')]
)
def test_padding_is_zero_with_zero_gradient(block, dtype):
  qkv, segments = inputs(dtype=dtype), packed()
  segments[1] = 0  # a row of padding only
  out = attend(*qkv, segments, block=block)
  pad = segments == 0
  assert out.dtype == dtype
  assert not np.any(out[pad])
  assert np.all(np.any(out[~pad] != 0, axis=(1, 2)))
  for grad in gradients(qkv, segments, block):
    assert np.all(np.isfinite(np.asarray(grad, np.float32)))
    assert not np.any(grad[pad])


def test_no_nan_on_the_way():
  with jax.debug_nans(True):
    gradients(inputs(), np.zeros((B, T), np.int32), 3)


@pytest.mark.parametrize('block', [3, T])
def test_bfloat16_is_near_float64(block):
  qkv = inputs(dtype=jnp.bfloat16)
  got = np.asarray(attend(*qkv, packed(), block=block), np.float64)
  want = reference.attend(*qkv, packed())
  # Two roundings to 8 bits (probabilities, output), values of size 1.
  np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-2)


def test_logits_are_float32():
  # 2^-7 apart at 64: bfloat16 logits would make the two keys equal.
  q = jnp.ones((1, 2, 1, 4), jnp.bfloat16)
  k = jnp.stack([jnp.full(4, 32.0), jnp.array([32, 32, 32, 32.25])])
  v = jnp.stack([jnp.zeros(4), jnp.ones(4)])
  k, v = (x[None, :, None].astype(jnp.bfloat16) for x in (k, v))
  ids = np.ones((1, 2), np.int32)
  out = lib.attend(q, k, v, ids, block=2)[0, 1, 0, 0]
  assert float(out) == pytest.approx(1 / (1 + math.exp(-0.125)), rel=4e-3)


def loop_bytes(block, T=256):
  """Temporary bytes of the compiled gradient."""
  qkv = [jax.ShapeDtypeStruct((1, T, n, H), jnp.float32) for n in (N, K, K)]
  ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
  fn = jax.jit(functools.partial(gradients, block=block))
  return fn.lower(qkv, ids).compile().memory_analysis().temp_size_in_bytes


def test_logits_of_all_queries_never_exist():
  dense = 4 * N * 256 * 256  # bytes of one T x S array
  assert loop_bytes(256) > 2 * dense  # the measure can tell
  assert loop_bytes(16) < dense / 2


@pytest.mark.multi_device
def test_sharded_heads_and_rows_need_no_communication():
  mesh = Mesh(
    np.array(jax.devices()[:4]).reshape(2, 2),
    ('data', 'tensor'),
    axis_types=(AxisType.Auto,) * 2,
  )
  heads = NamedSharding(mesh, jax.P('data', None, 'tensor'))
  qkv = tuple(jax.device_put(x, heads) for x in inputs())
  ids = jax.device_put(packed(), NamedSharding(mesh, jax.P('data')))
  fn = jax.jit(
    functools.partial(gradients, block=3), out_shardings=(heads,) * 3
  )
  text = fn.lower(qkv, ids).compile().as_text()
  assert 'all-' not in text and 'collective' not in text
  for got, want in zip(
    fn(qkv, ids), gradients(inputs(), packed(), 3), strict=True
  ):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_rope_equals_complex_rotation():
  x = inputs()[0]
  positions = np.random.default_rng(0).integers(0, 5000, (B, T))
  got = lib.rope(x, positions, 10000.0)
  want = reference.rotate(np.asarray(x, np.float64), positions, 10000.0)
  np.testing.assert_allclose(got, want, atol=2e-3)  # float32 angles of 5000
  near = positions % 16
  np.testing.assert_allclose(
    lib.rope(x, near, 10000.0),
    reference.rotate(np.asarray(x, np.float64), near, 10000.0),
    atol=5e-6,
  )


@settings(max_examples=20, deadline=None)
@given(a=st.integers(0, 200), b=st.integers(0, 200), shift=st.integers(0, 200))
def test_rope_products_depend_on_the_distance_only(a, b, shift):
  q, k, _ = inputs(T=1, K=N)

  def product(i, j):
    i, j = (np.full((B, 1), p, np.int32) for p in (i, j))
    return jnp.sum(lib.rope(q, i, 100.0) * lib.rope(k, j, 100.0), axis=-1)

  np.testing.assert_allclose(
    product(a, b), product(a + shift, b + shift), atol=1e-3
  )


def test_rope_does_nothing_at_zero_and_keeps_length():
  x = inputs()[0]
  zero = np.zeros((B, T), np.int32)
  np.testing.assert_array_equal(lib.rope(x, zero, 10000.0), x)
  turned = lib.rope(x, zero + 7, 10000.0)
  np.testing.assert_allclose(
    jnp.sum(turned**2, axis=-1), jnp.sum(x**2, axis=-1), rtol=1e-5
  )


def test_rope_rotates_in_float32():
  # In bfloat16 the position 1001 itself would round to 1000.
  x = jnp.ones((1, 1, H), jnp.bfloat16)
  position = np.array([[1001]])
  got = lib.rope(x, position, 10000.0)
  want = reference.rope(np.ones((1, H)), position[0], 10000.0)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    np.asarray(got[0], np.float64), want, rtol=1e-2, atol=1e-2
  )


def test_rope_takes_any_axes_between():
  x = inputs()[0]
  positions = np.tile(np.arange(T), (B, 1))
  want = lib.rope(x, positions, 10000.0)
  grouped = lib.rope(x.reshape(B, T, K, N // K, H), positions, 10000.0)
  np.testing.assert_array_equal(grouped.reshape(x.shape), want)
  one = lib.rope(x[:, :, 0], positions, 10000.0)
  np.testing.assert_array_equal(one, want[:, :, 0])

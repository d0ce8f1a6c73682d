"""Chunked cross-entropy against optax, hand-made logits and NumPy."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding

from gamma_jax import losses

B, T, D, V = 3, 7, 8, 19
CHUNKS = [1, 5, 6, B * T, 1000]  # fewer than B; uneven; even; all; more


def inputs(dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 4)
  hidden = jax.random.normal(keys[0], (B, T, D), dtype)
  head = jax.random.normal(keys[1], (D, V))
  labels = jax.random.randint(keys[2], (B, T), 0, V, jnp.int32)
  mask = jax.random.bernoulli(keys[3], 0.6, (B, T))
  return hidden, head, labels, mask


token_losses = jax.jit(losses.token_losses, static_argnames='chunk')
token_nll = jax.jit(losses.token_nll, static_argnames='chunk')


def naive(hidden, head, labels, mask):
  """The same sums with all logits at once."""
  logits = jnp.einsum('BTD,DV->BTV', hidden, head)
  nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  log_z = jax.nn.logsumexp(logits, axis=-1)
  return losses.LossSums(
    jnp.sum(nll * mask),
    jnp.sum(log_z**2 * mask),
    jnp.sum(mask),
    jnp.sum((jnp.argmax(logits, -1) == labels) * mask),
  )


@functools.partial(jax.jit, static_argnames=('fn', 'chunk', 'z_loss'))
def gradients(hidden, head, labels, mask, *, fn, z_loss=0.1, **kwargs):
  """Of the loss with z-loss, for hidden and head."""

  def loss(hidden, head):
    sums = fn(hidden, head, labels, mask, **kwargs)
    return sums.nll_sum + z_loss * sums.z_sum

  return jax.grad(loss, (0, 1))(hidden, head)


@pytest.mark.parametrize('chunk', CHUNKS)
def test_sums_equal_optax(chunk):
  got = token_losses(*inputs(), chunk=chunk)
  want = naive(*inputs())
  assert int(got.tokens) == int(want.tokens) > 0
  assert int(got.correct) == int(want.correct) > 0
  np.testing.assert_allclose(got.nll_sum, want.nll_sum, rtol=1e-6)
  np.testing.assert_allclose(got.z_sum, want.z_sum, rtol=1e-6)


@pytest.mark.parametrize('chunk', CHUNKS)
def test_gradient_equals_the_naive_one(chunk):
  got = gradients(*inputs(), fn=losses.token_losses, chunk=chunk)
  want = gradients(*inputs(), fn=naive)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_gradient_has_its_closed_form():
  hidden, head, labels, mask = inputs()
  got, _ = gradients(
    hidden, head, labels, mask, fn=losses.token_losses, chunk=5, z_loss=0.3
  )
  logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
  log_z = np.log(np.exp(logits).sum(-1, keepdims=True))
  d_logits = np.exp(logits - log_z) * (1 + 0.3 * 2 * log_z)
  d_logits -= np.eye(V)[labels]
  want = (d_logits * np.asarray(mask)[..., None]) @ np.asarray(head).T
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('chunk', CHUNKS)
def test_token_nll_has_every_position_in_place(chunk):
  hidden, head, labels, _ = inputs()
  want = optax.softmax_cross_entropy_with_integer_labels(hidden @ head, labels)
  got = token_nll(hidden, head, labels, chunk=chunk)
  assert got.shape == (B, T) and got.dtype == jnp.float32
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def hand_made(ids):
  """hidden and head with logit 100 for token ids[b, t], 0 for the others."""
  return 100.0 * jax.nn.one_hot(ids, V), jnp.eye(V)


def test_hand_made_logits_tell_next_from_current():
  tokens = jnp.array([[3, 3 + 1, 18, 0, 5, 7, 11, 2]])  # BOS 3, EOS 0
  inputs_, labels = tokens[:, :-1], tokens[:, 1:]
  mask = jnp.ones(labels.shape, bool)

  def score(hidden, head):
    sums = token_losses(hidden, head, labels, mask, chunk=3)
    nll = token_nll(hidden, head, labels, chunk=3)
    np.testing.assert_allclose(jnp.sum(nll), sums.nll_sum, rtol=1e-6)
    return nll, int(sums.correct)

  nll, correct = score(*hand_made(labels))
  np.testing.assert_allclose(nll, np.zeros(nll.shape), atol=1e-6)
  assert correct == labels.size
  nll, correct = score(*hand_made(inputs_))
  np.testing.assert_allclose(nll, np.full(nll.shape, 100.0), rtol=1e-6)
  assert correct == 0
  hidden, head = hand_made(labels)
  nll, correct = score(0 * hidden, head)
  np.testing.assert_allclose(nll, np.full(nll.shape, math.log(V)), rtol=1e-6)
  assert correct == 1  # a tie is a hit for the lowest id only: EOS here


@pytest.mark.parametrize('chunk', [1, 5, B * T])
@pytest.mark.parametrize('junk', [1e30, np.nan, np.inf])
def test_masked_positions_contribute_nothing(chunk, junk):
  hidden, head, labels, mask = inputs()
  where = mask[..., None]
  clean = (jnp.where(where, hidden, 0.0), head, labels, mask)
  dirty = (
    jnp.where(where, hidden, junk),
    head,
    jnp.where(mask, labels, -1),
    mask,
  )
  for a, b in zip(
    token_losses(*clean, chunk=chunk),
    token_losses(*dirty, chunk=chunk),
    strict=True,
  ):
    np.testing.assert_array_equal(a, b)
  grads = gradients(*dirty, fn=losses.token_losses, chunk=chunk)
  for a, b in zip(
    gradients(*clean, fn=losses.token_losses, chunk=chunk), grads, strict=True
  ):
    np.testing.assert_array_equal(a, b)
  assert not np.any(grads[0][~mask])


def test_nothing_scored_is_zero():
  hidden, head, labels, mask = inputs()
  none = jnp.zeros_like(mask)
  assert not any(token_losses(hidden, head, labels, none, chunk=5))
  for grad in gradients(
    hidden, head, labels, none, fn=losses.token_losses, chunk=5
  ):
    assert not np.any(grad)


@settings(max_examples=25, deadline=None)
@given(
  shift=st.floats(-1e4, 1e4, width=32),
  scale=st.floats(0, 50, width=32),
)
def test_large_and_shifted_logits(shift, scale):
  """Close to float64 at any size of the logits."""
  hidden, head, labels, mask = inputs()
  hidden = jnp.concatenate(
    [scale * hidden[..., 1:], jnp.full((B, T, 1), shift)], axis=-1
  )
  head = head.at[-1].set(1.0)  # adds `shift` to every logit
  got = token_losses(hidden, head, labels, mask, chunk=5)
  logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
  top = logits.max(-1)
  log_z = top + np.log(np.exp(logits - top[..., None]).sum(-1))
  picked = np.take_along_axis(logits, np.asarray(labels)[..., None], -1)[..., 0]
  size = np.abs(logits).max() + 1
  want = ((log_z - picked) * np.asarray(mask)).sum()
  assert abs(float(got.nll_sum) - want) < 1e-6 * size * B * T


def test_bfloat16_inputs_give_float32_logits():
  hidden, head, labels, mask = inputs(jnp.bfloat16)
  rounded = np.asarray(head.astype(jnp.bfloat16), np.float32)
  got = token_losses(hidden, head, labels, mask, chunk=5)
  want = naive(hidden.astype(jnp.float32), rounded, labels, mask)
  # Products of bfloat16 are exact in float32, so only the sums may differ.
  np.testing.assert_allclose(got.nll_sum, want.nll_sum, rtol=1e-5)
  dh, dw = gradients(
    hidden, head, labels, mask, fn=losses.token_losses, chunk=5
  )
  assert (dh.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)


def test_head_gradient_is_summed_in_its_own_dtype():
  # One term of 256 and then 255 of 1: bfloat16 sums would stay at 256.
  hidden = jnp.ones((1, 256, 1), jnp.bfloat16).at[0, 0].set(256)
  labels = jnp.zeros((1, 256), jnp.int32)
  head = jnp.zeros((1, 2), jnp.float32)
  mask = jnp.ones((1, 256), bool)
  _, dw = gradients(
    hidden, head, labels, mask, fn=losses.token_losses, chunk=1, z_loss=0.0
  )
  np.testing.assert_allclose(dw, [[-255.5, 255.5]])


def temp_bytes(chunk, B=4, T=64, V=2048):
  """Temporary bytes of the compiled gradient."""
  shape = jax.ShapeDtypeStruct
  args = (
    shape((B, T, D), jnp.float32),
    shape((D, V), jnp.float32),
    shape((B, T), jnp.int32),
    shape((B, T), bool),
  )
  fn = functools.partial(gradients, fn=losses.token_losses, chunk=chunk)
  lowered = jax.jit(fn).lower(*args)
  return lowered.compile().memory_analysis().temp_size_in_bytes


def test_logits_of_all_tokens_never_exist():
  dense = 4 * 4 * 64 * 2048  # bytes of tokens x V
  assert temp_bytes(1000) > 2 * dense  # the measure can tell
  assert temp_bytes(16) < dense / 2


@pytest.mark.multi_device
def test_sharded_rows_and_vocabulary():
  mesh = Mesh(
    np.array(jax.devices()).reshape(2, 2, 2),
    ('data', 'fsdp', 'tensor'),
    axis_types=(AxisType.Auto,) * 3,
  )
  rows, T = jax.P(('data', 'fsdp')), 6
  keys = jax.random.split(jax.random.key(0), 3)
  args = (
    jax.random.normal(keys[0], (4, T, D)),
    jax.random.normal(keys[1], (D, 64)),
    jax.random.randint(keys[2], (4, T), 0, 64, jnp.int32),
    jnp.ones((4, T), bool).at[1, 2:].set(False),
  )
  where = (rows, jax.P('fsdp', 'tensor'), rows, rows)
  sharded = [
    jax.device_put(x, NamedSharding(mesh, spec))
    for x, spec in zip(args, where, strict=True)
  ]
  fn = functools.partial(gradients, fn=losses.token_losses, chunk=8)
  got = jax.jit(fn, out_shardings=tuple(x.sharding for x in sharded[:2]))(
    *sharded
  )
  for a, b in zip(got, fn(*args), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  for a, b in zip(
    token_losses(*sharded, chunk=8), token_losses(*args, chunk=8), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-6)
  # Logits of one device's rows and half the vocabulary, never of all of it.
  text = token_losses.lower(*sharded, chunk=8).compile().as_text()
  assert 'f32[1,2,32]' in text and 'f32[1,2,64]' not in text
  assert 'f32[4,2,32]' not in text

"""Sinks against float64, the model's own attention and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gamma_jax import attend
from gamma_jax.analysis import attention_sink

# Two rows: documents of 5 and 4, then padding; a document of 11, then padding.
SEGMENTS = np.array([[1] * 5 + [2] * 4 + [0] * 3, [7] * 11 + [0]], np.int32)
B, T = SEGMENTS.shape
N, K, H = 4, 2, 8
METRICS = jax.jit(attention_sink.attention_metrics, static_argnums=3)


def draw(scale=1.0, dtype=np.float32):
  rng = np.random.default_rng(0)
  q = rng.standard_normal((B, T, N, H)) * scale
  return q.astype(dtype), rng.standard_normal((B, T, K, H)).astype(dtype)


def reference(q, k, segments):
  """Query by query in float64 -> sink, entropy, entropy share, each [N]."""
  sinks, entropies, shares = [], [], []
  for b, t in zip(*np.nonzero(segments), strict=True):
    keys = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
    for n in range(N):
      key = np.float64(k[b, keys, n // (N // K)])
      logits = key @ np.float64(q[b, t, n]) / H**0.5
      p = np.exp(logits - logits.max())
      p /= p.sum()
      entropy = -np.sum(p[p > 0] * np.log(p[p > 0]))
      sinks.append(p[0])
      entropies.append(entropy)
      shares.append(entropy / np.log(len(p)) if len(p) > 1 else np.nan)
  means = [np.array(x).reshape(-1, N) for x in (sinks, entropies, shares)]
  return [np.nanmean(x, axis=0) for x in means]


@pytest.mark.parametrize('block', [1, 5, 12, 128])
@pytest.mark.parametrize('scale', [1.0, 30.0])
def test_equals_float64_at_any_block(block, scale):
  q, k = draw(scale)
  got = METRICS(q, k, SEGMENTS, block)
  want = reference(q, k, SEGMENTS)
  for name, value in zip(
    ('sink_share', 'entropy', 'entropy_share'), want, strict=True
  ):
    np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


def test_equals_the_attention_of_the_model():
  # Values that are 1 at first tokens make attention return the sink share.
  q, k = draw()
  first = attention_sink.first_tokens(jnp.asarray(SEGMENTS))
  v = jnp.broadcast_to(first[..., None, None], (B, T, K, H))
  mass = attend.attend(q, k, v.astype(jnp.float32), SEGMENTS, block=4)
  want = np.asarray(mass)[SEGMENTS > 0].mean(axis=(0, 2))
  got = attention_sink.sink_share(q, k, SEGMENTS, block=4)
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_uniform_attention_is_the_floor():
  _, k = draw()
  q = np.zeros((B, T, N, H), np.float32)
  got = METRICS(q, k, SEGMENTS, 5)
  harmonic = [sum(1 / t for t in range(1, n + 1)) for n in (5, 4, 11)]
  floor = attention_sink.uniform_floor(jnp.asarray(SEGMENTS))
  np.testing.assert_allclose(floor, sum(harmonic) / 20, rtol=1e-6)
  np.testing.assert_allclose(got['sink_share'], np.full(N, floor), rtol=1e-6)
  np.testing.assert_allclose(got['entropy_share'], np.ones(N), rtol=1e-6)
  logs = [np.log(t) for n in (5, 4, 11) for t in range(1, n + 1)]
  np.testing.assert_allclose(got['entropy'], np.mean(logs), rtol=1e-6)


@pytest.mark.parametrize('n, floor', [(16, 0.211), (1024, 0.0073)])
def test_floor_of_one_document(n, floor):
  got = attention_sink.uniform_floor(jnp.ones((2, n), jnp.int32))
  np.testing.assert_allclose(got, floor, rtol=5e-3)


def test_all_mass_on_the_first_token_is_one():
  first = np.asarray(attention_sink.first_tokens(jnp.asarray(SEGMENTS)))
  k = np.where(first[..., None, None], 1e4, 0.0) * np.ones((1, 1, K, H))
  got = METRICS(np.ones((B, T, N, H), np.float32), jnp.float32(k), SEGMENTS, 5)
  np.testing.assert_array_equal(got['sink_share'], np.ones(N))
  np.testing.assert_allclose(got['entropy'], np.zeros(N), atol=1e-6)
  np.testing.assert_allclose(got['entropy_share'], np.zeros(N), atol=1e-6)


def test_first_token_is_of_the_document_not_of_the_row():
  first = attention_sink.first_tokens(jnp.asarray(SEGMENTS))
  assert np.argwhere(first).tolist() == [[0, 0], [0, 5], [1, 0]]
  late = jnp.array([[0, 0, 3, 3]], jnp.int32)
  assert np.argwhere(attention_sink.first_tokens(late)).tolist() == [[0, 2]]


def test_padding_does_not_count():
  q, k = draw()
  got = METRICS(q, k, SEGMENTS, 5)
  q[SEGMENTS == 0] = 1e3
  k[SEGMENTS == 0] = -1e3
  again = METRICS(q, k, SEGMENTS, 5)
  for name, value in got.items():
    np.testing.assert_array_equal(value, again[name])
  nothing = np.zeros_like(SEGMENTS)
  empty = METRICS(q, k, nothing, 5)
  assert all((value == 0).all() for value in empty.values())
  assert attention_sink.uniform_floor(jnp.asarray(nothing)) == 0


def test_half_precision_inputs_give_float32():
  q, k = draw(dtype=jnp.bfloat16)
  got = METRICS(q, k, SEGMENTS, 5)
  want = reference(q, k, SEGMENTS)
  assert got['sink_share'].dtype == jnp.float32
  np.testing.assert_allclose(got['sink_share'], want[0], rtol=1e-4)
  entropy, share = attention_sink.attention_entropy(q, k, SEGMENTS)
  np.testing.assert_allclose(entropy, want[1], rtol=1e-4)
  np.testing.assert_allclose(share, want[2], rtol=1e-4)


def test_scores_of_all_queries_never_exist_at_once():
  q = jax.ShapeDtypeStruct((1, 1024, 4, 8), jnp.float32)
  k = jax.ShapeDtypeStruct((1, 1024, 2, 8), jnp.float32)
  ids = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
  memory = METRICS.lower(q, k, ids, 32).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 4 * 1024 * 1024 * 4 / 4


def test_gates_elementwise_and_headwise():
  rng = np.random.default_rng(0)
  logits = rng.standard_normal((B, T, N, H)).astype(np.float32) * 3
  gate = 1 / (1 + np.exp(-np.float64(logits)))
  real = SEGMENTS > 0
  got = attention_sink.gate_stats(logits, SEGMENTS)
  np.testing.assert_allclose(
    got['gate_mean'], gate[real].mean(axis=(0, 2)), rtol=1e-5
  )
  np.testing.assert_allclose(
    got['gate_closed'], (gate[real] < 0.1).mean(axis=(0, 2)), rtol=1e-5
  )
  head = attention_sink.gate_stats(logits[..., 0])
  np.testing.assert_allclose(
    head['gate_mean'], gate[..., 0].mean(axis=(0, 1)), rtol=1e-5
  )
  start = attention_sink.gate_stats(np.zeros((B, T, N), np.float32))
  np.testing.assert_array_equal(start['gate_mean'], np.full(N, 0.5))
  np.testing.assert_array_equal(start['gate_closed'], np.zeros(N))


@pytest.mark.parametrize('scale', [1.0, 1e-30, 1e30])
def test_max_activation_ratio(scale):
  x = np.random.default_rng(0).standard_normal((B, T, 16))
  x[0, 11, 0] = 500  # padding
  real = x[SEGMENTS > 0]
  want = np.abs(real).max() / np.sqrt(np.mean(real**2))
  x = np.float32(x * scale)
  got = attention_sink.max_activation_ratio(x, SEGMENTS)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  assert attention_sink.max_activation_ratio(x) > 2 * want


def test_max_activation_ratio_closed_forms():
  ratio = attention_sink.max_activation_ratio
  np.testing.assert_allclose(ratio(-3 * np.ones((2, 3, 4))), 1, rtol=1e-6)
  one = np.zeros((2, 3, 16), np.float32)
  one[..., 5] = -2
  np.testing.assert_allclose(ratio(one), 4, rtol=1e-6)
  assert ratio(0 * one) == 0

"""The decoder against a float64 NumPy reference, and its invariances."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from gamma_jax import init_rules, layers, model
from gamma_jax.config import InitConfig, ModelConfig
from tests import reference

SMALL = ModelConfig(D=32, F=48, L=3, N=4, K=2, H=8, V=50, attention_block=5)


def setup(config, seed=0, gamma=0.5):
  """Params with norm scales moved off 1, so that a lost scale shows."""
  rule = init_rules.make_rule(InitConfig(gamma=gamma), config)
  net = model.Transformer(config, rule)
  tokens = jnp.zeros((1, 4), jnp.int32)
  params = meta.unbox(
    net.init(jax.random.key(seed), tokens, tokens, tokens)['params']
  )
  noise = np.random.default_rng(1)

  def shift(path, x):
    if path[-1].key != 'scale':
      return x
    return x * noise.uniform(0.5, 1.5, x.shape).astype(np.float32)

  return net, jax.tree_util.tree_map_with_path(shift, params)


def batch(config, B=2, T=13, seed=0):
  """Two documents a row, and padding at the end of the second row."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, config.V, (B, T)).astype(np.int32)
  segments = np.ones((B, T), np.int32)
  segments[0, 6:] = 2
  segments[1, 4:] = 2
  segments[1, 10:] = 0
  positions = np.zeros((B, T), np.int32)
  for b in range(B):
    for s in set(segments[b]):
      where = segments[b] == s
      positions[b, where] = np.arange(where.sum())
  return tokens, segments, positions


def logits(net, params, data, **kwargs):
  hidden, head = net.apply({'params': params}, *data, **kwargs)
  return hidden.astype(jnp.float32) @ head.astype(jnp.float32)


@pytest.mark.parametrize(
  'options',
  [
    {},
    {'mlp': 'gelu', 'gate': 'none'},
    {'gate': 'headwise', 'tied': True},
    {'qk_norm': True, 'K': 4},
    {'norm_eps': 1e-5, 'K': 1},
  ],
)
def test_forward_equals_the_float64_reference(options):
  config = dataclasses.replace(SMALL, **options)
  net, params = setup(config)
  data = batch(config)
  want = reference.forward(jax.tree.map(np.asarray, params), config, *data)
  got = np.asarray(logits(net, params, data))
  real = data[1] > 0
  np.testing.assert_allclose(got[real], want[real], rtol=2e-4, atol=2e-5)


def test_gate_matters():
  # Guards the reference test: a gate that both sides ignore would pass it.
  config = dataclasses.replace(SMALL, gate='elementwise')
  net, params = setup(config)
  data = batch(config)
  before = logits(net, params, data)
  kernel = params['blocks']['attn']['gate']['kernel']
  params['blocks']['attn']['gate']['kernel'] = kernel + 1.0
  assert not np.allclose(before, logits(net, params, data))


def test_causal_and_isolated_by_gradient():
  config = SMALL
  net, params = setup(config)
  tokens, segments, positions = batch(config)
  table = params['embed']['embedding']

  def picked(noise, t):
    # Noise enters through distinct embeddings of row 0's positions.
    def embed(name_table):
      return name_table

    ids = jnp.arange(13, dtype=jnp.int32)[None]
    p = dict(params, embed={'embedding': embed(table[tokens[0]]) + noise})
    small = dataclasses.replace(config, V=13, tied=True)
    net13 = model.Transformer(small, net.rule)
    p.pop('head')
    hidden, _ = net13.apply({'params': p}, ids, segments[:1], positions[:1])
    return jnp.sum(jnp.square(hidden[0, t]))

  for t, allowed in [(3, range(4)), (5, range(6)), (9, range(6, 10))]:
    grad = jax.grad(picked)(jnp.zeros((13, config.D)), t)
    touched = np.flatnonzero(np.abs(np.asarray(grad)).sum(-1))
    assert set(touched) == set(allowed)


@pytest.mark.parametrize(
  'options',
  [
    {'scan': False},
    {'remat': 'full'},
    {'remat': 'dots', 'scan': False},
    {'attention_block': 64},
  ],
)
def test_execution_options_do_not_change_loss_or_gradient(options):
  data = batch(SMALL)

  def loss(config):
    net, params = setup(SMALL)
    net = model.Transformer(config, net.rule)
    fn = lambda p: jnp.sum(jnp.square(logits(net, p, data)))  # noqa: E731
    return jax.value_and_grad(fn)(params)

  value, grads = loss(SMALL)
  other, other_grads = loss(dataclasses.replace(SMALL, **options))
  np.testing.assert_allclose(other, value, rtol=1e-5)
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(a).max())


def test_norm_eps_argument_replaces_the_configured_one():
  net, params = setup(SMALL, gamma=1.0)
  data = batch(SMALL)
  argument = logits(net, params, data, norm_eps=jnp.float32(1e-3))
  configured = model.Transformer(
    dataclasses.replace(SMALL, norm_eps=1e-3), net.rule
  )
  np.testing.assert_array_equal(argument, logits(configured, params, data))
  assert not np.allclose(argument, logits(net, params, data))


def test_bfloat16_compute_stays_near_float32():
  net, params = setup(SMALL)
  data = batch(SMALL)
  half = model.Transformer(
    dataclasses.replace(SMALL, dtype='bfloat16'), net.rule
  )
  full, low = logits(net, params, data), logits(half, params, data)
  real = data[1] > 0
  error = np.abs(np.asarray(low - full))[real].max()
  assert 0 < error < 0.1 * np.abs(np.asarray(full)).max()


# --- RMSNorm -----------------------------------------------------------------

# paper.md section 4a: sqrt(v / (v + eps)) for v = d^(-2 gamma).
SATURATION = [
  (512, 1.0, 1e-5, 0.526),
  (512, 1.0, 1e-6, 0.890),
  (1024, 1.0, 1e-5, 0.295),
  (1024, 1.0, 1e-8, 0.995),
  (2048, 1.0, 1e-5, 0.153),
  (2048, 1.0, 1e-6, 0.439),
  (2048, 1.0, 1e-12, 1.000),
  (4096, 1.0, 1e-5, 0.077),
  (4096, 1.0, 1e-8, 0.925),
  (2048, 0.5, 1e-5, 0.990),
]


@pytest.mark.parametrize('d, gamma, eps, kept', SATURATION)
def test_norm_keeps_the_share_of_scale_in_the_saturation_table(
  d, gamma, eps, kept
):
  x = jax.random.normal(jax.random.key(0), (64, d)) * d**-gamma
  y = layers.rms_norm(x, jnp.ones(d), eps)
  assert float(jnp.sqrt(jnp.mean(y**2))) == pytest.approx(kept, abs=0.004)


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16', 'float32'])
def test_norm_of_a_zero_row_is_zero_with_finite_gradient(dtype):
  x = jnp.zeros((2, 16), dtype)
  scale = jnp.ones(16)

  def total(x):
    return layers.rms_norm(x, scale, 1e-12).astype(jnp.float32).sum()

  y = layers.rms_norm(x, scale, 1e-12)
  assert y.dtype == x.dtype and not np.any(np.asarray(y, np.float32))
  grad = jax.grad(lambda x: total(x.astype(jnp.float32)))(x)
  # The gain at a zero row is 1/sqrt(eps) = 1e6, beyond float16's range.
  if dtype != 'float16':
    assert np.all(np.isfinite(np.asarray(grad, np.float32)))


@pytest.mark.parametrize('spiky', [False, True])
@pytest.mark.parametrize('scale', [1e-10, 1e-6, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_norm_equals_the_textbook_formula_in_float64(dtype, scale, spiky):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(4, 256)) * scale
  if spiky:
    x[:, 7] *= 100
  x = jnp.asarray(x, dtype)
  eps = 1e-12
  x64 = np.asarray(x, np.float64)
  want = x64 / np.sqrt(np.mean(x64**2, -1, keepdims=True) + eps)
  got = np.asarray(layers.rms_norm(x, jnp.ones(256), eps), np.float64)
  rtol = 1e-5 if dtype == 'float32' else 0.01
  np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize(
  'equation', ['BTD,DF->BTF', 'BTD,DNH->BTNH', 'BTNH,NHD->BTD']
)
def test_project_is_the_einsum_it_states(equation):
  size = dict(B=2, T=3, D=4, F=5, N=2, H=6)
  x, w = (
    jax.random.normal(jax.random.key(i), [size[a] for a in axes])
    for i, axes in enumerate(equation.partition('->')[0].split(','))
  )
  want = np.einsum(equation, np.float64(x), np.float64(w))
  np.testing.assert_allclose(
    layers.project(equation, x, w), want, rtol=2e-6, atol=2e-6
  )


@pytest.mark.parametrize(
  'equation',
  [
    'BTD,FD->BTF',
    'BDT,DF->BTF',
    'BTD,DF->BFT',
    'BTD,BDF->BTF',
    'BTNH,HND->BTD',
  ],
)
def test_project_refuses_what_is_not_one_product_of_matrices(equation):
  with pytest.raises(ValueError, match='batch'):
    layers.project(equation, jnp.ones((2, 3, 4)), jnp.ones((4, 5)))

"""Condensation metrics against float64, closed forms and known traps."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from gamma_jax import config, init_rules, layers, model, shapes
from gamma_jax.analysis import condensation

METRICS = jax.jit(condensation.matrix_metrics, static_argnums=1)


def gaussian(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def reference_stable_rank(w):
  s = np.linalg.svd(np.asarray(w, np.float64), compute_uv=False)
  return np.sum(s**2) / s[0] ** 2


def reference_cosines(w):
  w = np.asarray(w, np.float64)
  w = w / np.linalg.norm(w, axis=1, keepdims=True)
  cosines = np.abs(w @ w.T)
  off = ~np.eye(len(w), dtype=bool)
  share = np.max(np.sum(cosines > 0.7, axis=1)) / len(w)
  return cosines[off].mean(), share


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


def test_frobenius_ratio():
  w = gaussian(9, 4)
  start = condensation.frobenius(w)
  np.testing.assert_allclose(start, np.linalg.norm(w), rtol=1e-6)
  ratio = condensation.frobenius_ratio(jnp.bfloat16(3) * w, start)
  np.testing.assert_allclose(ratio, 3, rtol=1e-6)


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


def declared(kind, fan_in, fan_out, names):
  return layers.Declared(None, names, kind=kind, fan_in=fan_in, fan_out=fan_out)


def small_tree(L=2):
  """One stacked matrix, one that is not, and a norm, with declarations."""
  params = {
    'embed': jnp.asarray(gaussian(16, 8)),
    'norm': jnp.ones((L, 8)),
    'up': jnp.asarray(gaussian(L, 8, 12)),
  }
  return params, {
    'embed': declared('embed', 8, 16, ('vocab', 'embed')),
    'norm': declared(layers.NORM_SCALE, 1, 1, ('layers', 'embed')),
    'up': declared('up', 8, 12, ('layers', 'embed', 'mlp')),
  }


def test_tree_of_the_model_is_covered_and_oriented():
  c = config.ModelConfig(
    D=8, F=12, L=2, N=2, K=1, H=4, V=16, mlp='swiglu', gate='elementwise'
  )
  rule = init_rules.make_rule(config.InitConfig(), c)
  boxed = model.abstract_params(c, rule)
  declarations = layers.declarations(boxed)
  params = jax.tree.map(lambda x: gaussian(*x.shape), meta.unbox(boxed))
  out = jax.jit(lambda p: condensation.tree_metrics(p, declarations))(params)
  kinds = ('q', 'k', 'v', 'o', 'gate', 'up', 'mlp_gate', 'down')
  labels = [f'{kind}/{layer}' for kind in kinds for layer in (0, 1)]
  names = ('stable_rank', 'mean_abs_cosine', 'cluster_share', 'frobenius')
  assert set(out) == {
    f'condense/{name}/{label}'
    for name in names
    for label in (*labels, 'embed', 'head')
  }
  assert all(value.shape == () for value in out.values())
  attention = params['blocks']['attn']
  rows = {
    'q/1': attention['q']['kernel'][1].reshape(8, 8).T,
    'o/1': attention['o']['kernel'][1].reshape(8, 8).T,
    'down/0': params['blocks']['mlp']['down']['kernel'][0].T,
    'embed': params['embed']['embedding'],
    'head': params['head']['kernel'].T,
  }
  for label, w in rows.items():
    got = out[f'condense/mean_abs_cosine/{label}']
    np.testing.assert_allclose(got, reference_cosines(w)[0], rtol=1e-4)


@pytest.mark.parametrize('L', [1, 3])
def test_layers_are_counted_also_when_there_is_one(L):
  params, declarations = small_tree(L)
  out = jax.eval_shape(
    lambda p: condensation.tree_metrics(p, declarations), params
  )
  labels = {key.removeprefix('condense/stable_rank/') for key in out}
  assert {f'up/{layer}' for layer in range(L)} | {'embed'} == {
    label for label in labels if '/' not in label or label.startswith('up/')
  }


def test_tree_ratio_to_the_start_of_a_population():
  params, declarations = small_tree()
  pair = jax.tree.map(lambda x: jnp.stack([x, 4 * x]), params)
  start = condensation.tree_metrics(params, declarations)
  assert not [key for key in start if 'frobenius_ratio' in key]
  now = jax.jit(
    jax.vmap(lambda p: condensation.tree_metrics(p, declarations, start))
  )(pair)
  ratios = {k: v for k, v in now.items() if '/frobenius_ratio/' in k}
  assert len(ratios) == 3
  for value in ratios.values():
    np.testing.assert_allclose(value, [1, 4], rtol=1e-6)
  for key, value in start.items():
    np.testing.assert_allclose(now[key][0], value, rtol=1e-4)


def test_experts_are_averaged_and_shared_kinds_named_by_path():
  w = jnp.asarray(gaussian(2, 3, 8, 12))  # L, E, D, F
  w = w.at[1, 0].set(1.0)
  names = ('layers', 'experts', 'embed', 'mlp')
  params = {'experts': {'up': w}, 'router': jnp.asarray(gaussian(2, 8, 3))}
  declarations = {
    'experts/up': declared('up', 8, 12, names),
    'router': declared('router', 8, 3, ('layers', 'embed', 'experts')),
  }
  out = condensation.tree_metrics(params, declarations)
  want = np.mean([reference_stable_rank(x) for x in w[1]])
  np.testing.assert_allclose(out['condense/stable_rank/up/1'], want, rtol=1e-4)
  params['shared'] = {'up': w[:, 1]}
  declarations['shared/up'] = declared('up', 8, 12, ('layers', 'embed', 'mlp'))
  out = jax.eval_shape(
    lambda p: condensation.tree_metrics(p, declarations), params
  )
  assert 'condense/stable_rank/experts.up/0' in out
  assert 'condense/stable_rank/shared.up/0' in out


def test_shape_that_contradicts_its_declaration_is_an_error():
  box = declared('up', 8, 12, ('layers', 'embed', 'mlp'))
  with pytest.raises(ValueError, match='parameter up of shape'):
    condensation.declared_axes(box, (2, 12, 8), 'up')


def test_dense_kernel_of_flax_is_in_out():
  kernel = nn.Dense(5).init(jax.random.key(0), jnp.ones((1, 3)))['params']
  w = condensation.as_matrix(kernel['kernel'], shapes.Axes(0, 1))
  assert w.shape == (5, 3)  # neurons, inputs

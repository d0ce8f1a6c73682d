"""Condensation metrics of whole models: names, layers, experts, axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from gamma_jax import config, init_rules, layers, model
from gamma_jax.analysis import condensation_tree
from tests.matrices import (
  gaussian,
  reference_cosines,
  reference_stable_rank,
)


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
  out = jax.jit(lambda p: condensation_tree.tree_metrics(p, declarations))(
    params
  )
  kinds = ('q', 'k', 'v', 'o', 'gate', 'up', 'mlp_gate', 'down')
  labels = [f'{kind}/{layer}' for kind in kinds for layer in (0, 1)]
  names = (
    'stable_rank',
    'mean_abs_cosine',
    'cluster_share',
    'frobenius',
    'effective_rank',
  )
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
    lambda p: condensation_tree.tree_metrics(p, declarations), params
  )
  labels = {key.removeprefix('condense/stable_rank/') for key in out}
  assert {f'up/{layer}' for layer in range(L)} | {'embed'} == {
    label for label in labels if '/' not in label or label.startswith('up/')
  }


def test_experts_are_averaged_and_shared_kinds_named_by_path():
  w = jnp.asarray(gaussian(2, 3, 8, 12))  # L, E, D, F
  w = w.at[1, 0].set(1.0)
  names = ('layers', 'experts', 'embed', 'mlp')
  params = {'experts': {'up': w}, 'router': jnp.asarray(gaussian(2, 8, 3))}
  declarations = {
    'experts/up': declared('up', 8, 12, names),
    'router': declared('router', 8, 3, ('layers', 'embed', 'experts')),
  }
  out = condensation_tree.tree_metrics(params, declarations)
  want = np.mean([reference_stable_rank(x) for x in w[1]])
  np.testing.assert_allclose(out['condense/stable_rank/up/1'], want, rtol=1e-4)
  params['shared'] = {'up': w[:, 1]}
  declarations['shared/up'] = declared('up', 8, 12, ('layers', 'embed', 'mlp'))
  out = jax.eval_shape(
    lambda p: condensation_tree.tree_metrics(p, declarations), params
  )
  assert 'condense/stable_rank/experts.up/0' in out
  assert 'condense/stable_rank/shared.up/0' in out


def test_shape_that_contradicts_its_declaration_is_an_error():
  box = declared('up', 8, 12, ('layers', 'embed', 'mlp'))
  with pytest.raises(ValueError, match='parameter up of shape'):
    condensation_tree.declared_axes(box, (2, 12, 8), 'up')

"""d_in of every parameter of the real model, stated and realised."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from gamma_jax import init_rules, layers, model
from gamma_jax.config import ROLES, InitConfig, InitOverrides, ModelConfig

SHAPE = ModelConfig(
  D=128, F=320, L=4, N=8, K=2, H=24, V=512, mlp='swiglu', gate='elementwise'
)
# The table of the design: parameter path -> (kind, d_in).
TABLE = {
  'embed/embedding': ('embed', 128),
  'head/kernel': ('head', 128),
  'blocks/attn/q/kernel': ('q', 128),
  'blocks/attn/k/kernel': ('k', 128),
  'blocks/attn/v/kernel': ('v', 128),
  'blocks/attn/gate/kernel': ('gate', 128),
  'blocks/attn/o/kernel': ('o', 8 * 24),
  'blocks/mlp/up/kernel': ('up', 128),
  'blocks/mlp/gate/kernel': ('mlp_gate', 128),
  'blocks/mlp/down/kernel': ('down', 320),
}
NORMS = {
  'blocks/attn_norm/scale',
  'blocks/mlp_norm/scale',
  'final_norm/scale',
}


def draw(shape=SHAPE, seed=0, **init):
  config = InitConfig(**init)
  rule = init_rules.make_rule(config, shape)
  tokens = jnp.zeros((1, 4), jnp.int32)
  net = model.Transformer(shape, rule)
  boxed = net.init(jax.random.key(seed), tokens, tokens, tokens)['params']
  return layers.declarations(boxed)


@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize('scan', [False, True])
def test_every_parameter_states_the_fan_in_of_the_table(tied, scan):
  shape = dataclasses.replace(SHAPE, tied=tied, scan=scan)
  expected = dict(TABLE)
  if tied:
    del expected['head/kernel']
  found = draw(shape)
  assert {p: (d.kind, d.fan_in) for p, d in found.items()} == {
    **expected,
    **{p: (layers.NORM_SCALE, 1) for p in NORMS},
  }


@pytest.mark.parametrize('distribution', ['normal', 'truncated_normal'])
@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize('gamma', [0.5, 1.0])
def test_realised_std_of_every_layer(gamma, tied, distribution):
  shape = dataclasses.replace(SHAPE, tied=tied)
  found = draw(shape, gamma=gamma, distribution=distribution)
  for path, d in found.items():
    value = np.asarray(d.value)
    if d.kind == layers.NORM_SCALE:
      np.testing.assert_array_equal(value, 1.0)
      continue
    copies = value if path.startswith('blocks/') else value[None]
    assert len(copies) == (4 if path.startswith('blocks/') else 1)
    for layer in copies:
      z = (layer.std() / TABLE[path][1] ** -gamma - 1) * (2 * layer.size) ** 0.5
      assert abs(z) < 4.5, (path, z)  # sampling error of a std, in sigmas


def test_headwise_gate_has_the_width_as_fan_in():
  found = draw(dataclasses.replace(SHAPE, gate='headwise'))
  gate = found['blocks/attn/gate/kernel']
  assert (gate.fan_in, gate.value.shape) == (128, (4, 128, 8))


def test_layers_differ_and_scan_draws_what_unrolled_draws():
  scanned = draw(SHAPE)
  unrolled = draw(dataclasses.replace(SHAPE, scan=False))
  for path, d in scanned.items():
    np.testing.assert_array_equal(d.value, unrolled[path].value)
  q = np.asarray(scanned['blocks/attn/q/kernel'].value)
  assert not np.array_equal(q[0], q[1])


def test_two_gammas_differ_by_the_exact_factor_everywhere():
  # No matrix escapes the knob: each changes by d_in^(g2 - g1), norms by none.
  a, b = draw(gamma=0.5), draw(gamma=1.0)
  for path, d in a.items():
    if d.kind == layers.NORM_SCALE:
      np.testing.assert_array_equal(d.value, b[path].value)
    else:
      factor = d.fan_in**0.5
      np.testing.assert_allclose(d.value, b[path].value * factor, rtol=3e-7)


@pytest.mark.parametrize('role', [r for r in ROLES if r != 'router'])
def test_an_override_changes_exactly_its_role(role):
  base = draw(gamma=0.75)
  other = draw(gamma=0.75, overrides=InitOverrides(**{role: 0.5}))
  changed = {
    p for p in base if not np.array_equal(base[p].value, other[p].value)
  }
  assert changed == {
    p for p, (kind, _) in TABLE.items() if init_rules.ROLE_OF_KIND[kind] == role
  }


@pytest.mark.parametrize(
  'option, paths, factor',
  [
    (
      {'depth_scale': True},
      {'blocks/attn/o/kernel', 'blocks/mlp/down/kernel'},
      8**-0.5,
    ),
    ({'down_fan_in': 'model'}, {'blocks/mlp/down/kernel'}, 320 / 128),
  ],
)
def test_an_option_changes_exactly_what_it_names(option, paths, factor):
  base, other = draw(gamma=1.0), draw(gamma=1.0, **option)
  for path, d in base.items():
    ratio = factor if path in paths else 1.0
    np.testing.assert_allclose(
      other[path].value, d.value * np.float32(ratio), rtol=3e-7
    )


def expected_std(rule, kind, fan_in, fan_out, D=128, L=4):
  residual = kind in ('o', 'down')
  return {
    'fixed': 0.006,
    'xavier': (2 / (fan_in + fan_out)) ** 0.5,
    'he': (2 / fan_in) ** 0.5,
    'gpt2': 0.02 / (8**0.5 if residual else 1),
    'megatron': 0.006 / (8**0.5 if residual else 1),
    'small_wang': 2 / (L * D**0.5) if residual else (2 / (5 * D)) ** 0.5,
  }[rule]


@pytest.mark.parametrize('rule', [r for r in init_rules.RULES if r != 'gamma'])
def test_comparison_rules_match_their_sources(rule):
  for path, d in draw(rule=rule, std=0.006).items():
    if d.kind == layers.NORM_SCALE:
      continue
    want = expected_std(rule, d.kind, d.fan_in, d.fan_out)
    assert np.std(d.value) == pytest.approx(want, rel=0.03), path


def test_a_parameter_without_a_declaration_is_an_error():
  boxed = model.abstract_params(
    SHAPE, init_rules.make_rule(InitConfig(), SHAPE)
  )
  boxed['stray'] = meta.unbox(boxed['final_norm'])
  with pytest.raises(ValueError, match='stray/scale is not declared'):
    layers.declarations(boxed)


def test_parameter_dtype_is_what_was_asked():
  for dtype in ('float32', 'bfloat16'):
    shape = dataclasses.replace(SHAPE, param_dtype=dtype, dtype='bfloat16')
    assert {str(d.value.dtype) for d in draw(shape).values()} == {dtype}

"""Counts held against the model's parameters, products and compiled step."""

import dataclasses
import math

import jax
import jax.extend
import jax.numpy as jnp
import pytest

from gamma_jax import (
  configure,
  flops,
  init_rules,
  layers,
  metrics,
  model,
  program,
  train_step,
)
from gamma_jax.config import Config, InitConfig, ModelConfig, TrainConfig
from gamma_jax.config import MoeConfig as Moe

SMALL = ModelConfig(D=32, F=48, L=3, N=4, K=2, H=8, V=50)
# Moderate sizes, so that the arrays that are counted outweigh the rest.
MIDDLE = ModelConfig(D=128, F=384, L=6, N=4, K=2, H=32, V=2048)
OPTIONS = [
  {},
  {'tied': True},
  {'mlp': 'gelu', 'gate': 'none'},
  {'gate': 'headwise', 'qk_norm': True, 'K': 4},
  {'moe': Moe(experts=4, top_k=2)},
  {'moe': Moe(experts=4, top_k=1, F=20, shared=2), 'mlp': 'gelu'},
]


def with_options(base, options):
  return dataclasses.replace(base, **options)


@pytest.mark.parametrize('options', OPTIONS)
def test_parameters_are_those_of_the_model(options):
  config = with_options(SMALL, options)
  rule = init_rules.make_rule(InitConfig(), config)
  declared = layers.declarations(model.abstract_params(config, rule))
  want = {}
  for path, role in metrics.roles(declared).items():
    want[role] = want.get(role, 0) + math.prod(declared[path].value.shape)
  assert flops.by_role(config) == want
  assert flops.parameters(config).total == sum(want.values())


def test_counts_by_hand():
  attention = 32 * 8 * (4 + 2 + 2 + 4 + 4)  # q, k, v, gate, o
  block = attention + 3 * 32 * 48 + 2 * 32
  count = flops.parameters(SMALL)
  assert count.non_embedding == 3 * block + 32
  assert count.embedding == 2 * 50 * 32
  assert count.total == count.active == count.non_embedding + count.embedding

  tied = flops.parameters(with_options(SMALL, {'tied': True}))
  assert tied.embedding == 50 * 32
  assert tied.non_embedding == count.non_embedding
  assert tied.total == count.total - 50 * 32


def test_idle_experts_are_not_active():
  moe = Moe(experts=8, top_k=2, F=20, shared=1)
  count = flops.parameters(with_options(SMALL, {'moe': moe}))
  expert = 3 * 32 * 20
  dense = flops.parameters(SMALL).total - 3 * 3 * 32 * 48
  assert count.total == dense + 3 * (32 * 8 + 9 * expert)
  assert count.active == dense + 3 * (32 * 8 + 3 * expert)


def product_flops(jaxpr):
  """FLOPs of every matrix product in a jaxpr, loops as often as they run."""
  total = 0
  for eqn in jaxpr.eqns:
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      total += eqn.params.get('length', 1) * product_flops(inner)
    if eqn.primitive.name == 'dot_general':
      (contracted, _), _ = eqn.params['dimension_numbers']
      terms = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
      if contracted:  # without, it is the outer product of the rope angles
        total += 2 * terms * eqn.outvars[0].aval.size
  return total


@pytest.mark.parametrize(
  'options', [o for o in OPTIONS if 'moe' not in o], ids=str
)
def test_flops_are_those_of_the_products(options):
  config, T = with_options(SMALL, options), 16
  rule = init_rules.make_rule(InitConfig(), config)
  net = model.Transformer(config, rule)
  params = model.abstract_params(config, rule)
  ids = jax.ShapeDtypeStruct((1, T), jnp.int32)

  def logits(params, ids):
    hidden, head = net.apply({'params': params}, ids, ids, ids)
    return hidden @ head

  dense = product_flops(jax.make_jaxpr(logits)(params, ids).jaxpr)
  # The model multiplies with all T keys; a token needs those before it.
  pair = 2 * 2 * config.L * config.N * config.H  # with k and with v
  causal = dense - pair * T * T + pair * sum(range(1, T + 1))
  assert flops.flops_per_token(config, T) * T == 3 * causal


def test_flops_of_experts_by_hand():
  moe = Moe(experts=8, top_k=2, F=48, shared=0)
  one = with_options(SMALL, {'moe': moe})
  extra = 3 * (32 * 8 + 3 * 32 * 48)  # the router, and a second MLP
  assert (
    flops.flops_per_token(one, 16)
    == flops.flops_per_token(SMALL, 16) + 6 * extra
  )


@pytest.mark.parametrize(
  ('options', 'train'),
  [
    ({}, {}),
    ({'remat': 'full'}, {}),
    pytest.param(
      {'remat': 'dots', 'mlp': 'gelu', 'gate': 'none'},
      {'accumulation': 2},
      marks=pytest.mark.slow,
    ),
    pytest.param(
      {'moe': Moe(experts=4, F=128), 'attention_block': 64},
      {},
      marks=pytest.mark.slow,
    ),
  ],
)
def test_memory_is_near_that_of_the_compiled_step(options, train):
  config = Config(
    model=with_options(MIDDLE, options),
    train=TrainConfig(batch_size=8, seq_len=256, **train),
  )
  compiled = program.build(configure.program_key(config), (jax.devices()[0],))
  rows = jax.ShapeDtypeStruct((8, 257), jnp.int32)
  batch = {k: rows for k in ('tokens', 'segment_ids', 'positions')}
  step = compiled.in_mesh(compiled.step.__wrapped__.lower)
  lowered = step(compiled.abstract_state, train_step.hyper(config), batch)
  memory = lowered.compile().memory_analysis()
  # What comes out takes the place of what goes in: the state is donated.
  real = memory.argument_size_in_bytes + memory.temp_size_in_bytes
  estimate = sum(flops.train_bytes(config).values())
  assert 0.8 * real < estimate < 1.25 * real


def test_shards_divide_memory():
  config = Config(model=MIDDLE, train=TrainConfig(batch_size=8, seq_len=256))
  one = flops.train_bytes(config)
  total = flops.parameters(MIDDLE).total
  assert one['params'] == one['gradients'] == 4 * total
  assert one['moments'] == 8 * total
  assert one['gathered'] == 0
  eight = flops.train_bytes(config, weight_shards=8, batch_shards=8)
  for item in ('params', 'moments', 'gradients', 'activations', 'layer'):
    assert eight[item] == pytest.approx(one[item] / 8, rel=1e-3)
  assert eight['gathered'] > 0


def test_logits_are_those_of_a_chunk():
  def logits(**train):
    config = Config(model=MIDDLE, train=TrainConfig(seq_len=256, **train))
    return flops.train_bytes(config)['logits']

  a, b = logits(loss_chunk=256), logits(loss_chunk=512)
  assert b - a == 3 * 4 * 256 * MIDDLE.V
  assert logits(loss_chunk=10**9) < 4 * 4 * 8 * 256 * (MIDDLE.V + MIDDLE.D)


def test_a_layer_holds_the_larger_of_its_branches():
  def layer(block):
    shape = with_options(MIDDLE, {'attention_block': block})
    config = Config(model=shape, train=TrainConfig(batch_size=8, seq_len=256))
    return flops.train_bytes(config)['layer']

  assert layer(8) == layer(16) < layer(512) == layer(256)
  of_a_query = 3 * 4 * 8 * MIDDLE.N * 256
  assert layer(256) - layer(224) == 32 * of_a_query


@pytest.mark.parametrize(('dispatch', 'times'), [('ragged', 2), ('blocks', 1)])
def test_devices_that_share_experts_hold_each_others_rows(dispatch, times):
  moe = with_options(MIDDLE, {'moe': Moe(experts=8, F=128, dispatch=dispatch)})
  config = Config(model=moe, train=TrainConfig(batch_size=8, seq_len=256))
  apart = flops.train_bytes(config, weight_shards=4, batch_shards=4)
  shared = flops.train_bytes(
    config, weight_shards=4, batch_shards=4, expert_shards=4
  )
  more = shared['activations'] / apart['activations']
  assert times < more < times + 1
  assert shared['gathered'] < apart['gathered']
  assert shared['params'] == apart['params']


def test_half_precision_halves_what_is_not_a_norm():
  base = {'remat': 'full', 'qk_norm': True}
  config = Config(model=with_options(MIDDLE, base))
  half = Config(model=with_options(MIDDLE, {**base, 'dtype': 'bfloat16'}))
  a, b = flops.train_bytes(config), flops.train_bytes(half)
  assert b['activations'] == a['activations'] / 2
  assert b['params'] == a['params'] and b['moments'] == a['moments']

"""Which class reads an export, and that its tensors are ours, moved."""

import dataclasses

import jax
import numpy as np
import pytest
from flax.core import meta

from gamma_jax import hf_layout, hf_tokenizer, init_rules, model
from gamma_jax.config import Config, InitConfig, ModelConfig, MoeConfig
from gamma_jax.errors import ConfigError

PLAIN = ModelConfig(D=8, F=6, L=3, N=4, K=2, H=4, V=11, gate='none')
VARIANTS = {
  'llama': PLAIN,
  'qwen3': dataclasses.replace(PLAIN, qk_norm=True, tied=True),
  'elementwise': dataclasses.replace(PLAIN, gate='elementwise', mlp='gelu'),
  'headwise': dataclasses.replace(PLAIN, gate='headwise', qk_norm=True),
}


def drawn(config, seed=0):
  """Parameters of the model's shapes with ordinary normal entries."""
  rng = np.random.default_rng(seed)
  rule = init_rules.make_rule(InitConfig(), config)
  shapes = meta.unbox(model.abstract_params(config, rule))
  return jax.tree.map(
    lambda x: rng.standard_normal(x.shape).astype(x.dtype), shapes
  )


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('name', VARIANTS)
def test_there_and_back_gives_the_same_bits(name, dtype):
  config = dataclasses.replace(VARIANTS[name], param_dtype=dtype)
  params = drawn(config)
  back = hf_layout.from_tensors(hf_layout.to_tensors(params, config), config)
  assert jax.tree.structure(back) == jax.tree.structure(params)
  for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(back), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


def test_rows_are_outputs_heads_first():
  params = drawn(VARIANTS['elementwise'])
  tensors = hf_layout.to_tensors(params, VARIANTS['elementwise'])
  attn, H = params['blocks']['attn'], 4
  layer = 'model.layers.2.self_attn'
  d, n, k, h = 5, 3, 1, 2
  for name, ours, row in (
    ('q', 'q', n * H + h),
    ('k', 'k', k * H + h),
    ('g', 'gate', n * H + h),
  ):
    head = k if name == 'k' else n
    got = tensors[f'{layer}.{name}_proj.weight'][row, d]
    assert got == attn[ours]['kernel'][2, d, head, h]
  got = tensors[f'{layer}.o_proj.weight'][d, n * H + h]
  assert got == attn['o']['kernel'][2, n, h, d]
  assert tensors['lm_head.weight'].shape == (11, 8)


@pytest.mark.parametrize(
  ('change', 'name'),
  [
    ({}, 'LlamaForCausalLM'),
    ({'qk_norm': True}, 'Qwen3ForCausalLM'),
    ({'gate': 'headwise'}, 'GammaForCausalLM'),
    ({'mlp': 'gelu'}, 'GammaForCausalLM'),
    ({'D': 10}, 'GammaForCausalLM'),  # transformers refuses 10 / 4 heads
  ],
)
def test_the_class_that_reads_it(change, name):
  assert hf_layout.architecture(dataclasses.replace(PLAIN, **change)) == name


def test_experts_are_refused_by_name():
  config = dataclasses.replace(PLAIN, moe=MoeConfig(experts=4))
  with pytest.raises(ConfigError, match='model.moe.experts=4 cannot'):
    hf_layout.architecture(config)


def test_the_config_keeps_every_number():
  config = dataclasses.replace(PLAIN, norm_eps=1e-12, rope_theta=5e5)
  got = hf_layout.config_json(Config(model=config), eot_id=10)
  assert (got['rms_norm_eps'], got['rope_theta']) == (1e-12, 5e5)
  assert (got['head_dim'], got['num_key_value_heads']) == (4, 2)
  assert (got['bos_token_id'], got['tie_word_embeddings']) == (10, False)
  assert 'auto_map' not in got


@pytest.mark.parametrize(
  ('break_it', 'message'),
  [
    (lambda t: t.pop('model.norm.weight'), 'model.norm.weight is missing'),
    (lambda t: t.update(extra=np.zeros(2)), 'extra belongs to no parameter'),
    (lambda t: t.update({'lm_head.weight': np.zeros((8, 11))}), r'\(8, 11\)'),
  ],
)
def test_foreign_tensors_are_refused(break_it, message):
  tensors = hf_layout.to_tensors(drawn(PLAIN), PLAIN)
  break_it(tensors)
  with pytest.raises(ConfigError, match=message):
    hf_layout.from_tensors(tensors, PLAIN)


def test_merges_list_every_pair_by_rank():
  ranks = [b'a', b'b', b' ', b'ab', b'ba', b'aba']
  found = hf_tokenizer.tokenizer_json('.', ranks)['model']
  assert found['merges'] == [['a', 'b'], ['b', 'a'], ['a', 'ba'], ['ab', 'a']]
  assert found['vocab']['\u0120'] == 2  # the space, as ByteLevel writes it

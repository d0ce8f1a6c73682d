"""gamma on models of other people: measured, redrawn, measured again.

Three packages from PyPI, installed by `pip install -e .[examples]`:

  recurrentgemma  Linen  Griffin: RG-LRU blocks and local attention
  transformers    Linen  GPT-2 (Flax, last in version 4); kernels are [out, in]
  mamba2-jax      NNX    Mamba-2

Run: python -m experiments.portable_examples     (CPU, under a minute)

The first table of each model holds its own initializers against gamma = 0.5,
which is what `variance_scaling` and `lecun_normal` mean to give. What is off
there follows another rule (GPT-2's fixed 0.02) or takes a fan-in that is not
the number of terms it sums (Griffin's gates and MLP). The second table is after
`reinit` at gamma = 1.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gamma_jax import EXEMPT, Axes, audit, reinit

DENSE = Axes(in_axis=(0,), out_axis=(1,))
TRANSPOSED = Axes(in_axis=(1,), out_axis=(0,))  # tables, and [out, in] kernels
STACK = Axes(in_axis=(1,), out_axis=(2,), batch_axis=(0,))


def build_griffin() -> tuple[Any, dict]:
  """Google DeepMind's recurrentgemma: one recurrent and one attention block."""
  from recurrentgemma import common
  from recurrentgemma.jax import Griffin

  config = common.GriffinConfig(
    vocab_size=512,
    width=256,
    mlp_expanded_width=512,
    num_heads=4,
    lru_width=256,
    block_types=(
      common.TemporalBlockType.RECURRENT,
      common.TemporalBlockType.ATTENTION,
    ),
    embeddings_scale_by_sqrt_dim=True,
    attention_window_size=16,
    logits_soft_cap=30.0,
  )
  tokens = jnp.zeros((1, 4), jnp.int32)
  with jax.numpy_rank_promotion('allow'):  # the package relies on it
    init = jax.jit(Griffin(config).init)
    params = init(jax.random.key(0), tokens, jnp.arange(4)[None])['params']
  rules = {
    'embedder/input_embedding': TRANSPOSED,
    'blocks.*/**/kernel': DENSE,
    # [2, D, F]: the MLP's gate and its value, side by side.
    'blocks.*/mlp_block/ffw_up/w': STACK,
    # [N, D / N, D / N]: block-diagonal, each block reads D / N channels.
    'blocks.*/recurrent_block/rg_lru/*_gate/w': STACK,
    # [W, D]: depthwise, each channel sees W steps of itself.
    'blocks.*/recurrent_block/conv_1d/w': DENSE,
    'blocks.*/recurrent_block/rg_lru/a_param': EXEMPT,
    '**/scale': EXEMPT,
    '**/bias': EXEMPT,
    '**/b': EXEMPT,
  }
  return params, rules


def build_gpt2() -> tuple[Any, dict]:
  """GPT-2 of Hugging Face, two layers at a fifth of its width."""
  from transformers import FlaxGPT2LMHeadModel, GPT2Config

  config = GPT2Config(
    vocab_size=512, n_positions=128, n_embd=144, n_layer=2, n_head=4
  )
  with jax.numpy_rank_promotion('allow'):  # the package relies on it
    model = FlaxGPT2LMHeadModel(config, seed=0)
  rules = {
    'transformer/w[tp]e/embedding': TRANSPOSED,
    # Conv1D keeps [out, in] and transposes in the call.
    'transformer/h/*/**/kernel': TRANSPOSED,
    '**/scale': EXEMPT,
    '**/bias': EXEMPT,
  }
  return model.params, rules


def build_mamba2() -> tuple[Any, dict]:
  """Mamba-2, two layers; put back with nnx.update(model, params)."""
  from flax import nnx
  from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

  config = Mamba2Config(
    vocab_size=512,
    hidden_size=128,
    state_size=32,
    head_dim=32,
    chunk_size=16,
    num_hidden_layers=2,
  )
  model = Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))
  mixer = 'backbone/layers/*/mixer'
  rules = {
    'backbone/embedder/embedding': TRANSPOSED,
    f'{mixer}/*_proj/kernel': DENSE,
    # [W, 1, D]: depthwise.
    f'{mixer}/conv1d/conv/kernel': Axes((0, 1), (2,)),
    f'{mixer}/conv1d/conv/bias': EXEMPT,
    f'{mixer}/A_log': EXEMPT,
    f'{mixer}/D': EXEMPT,
    f'{mixer}/dt_bias': EXEMPT,
    '**/weight': EXEMPT,  # RMSNorm
  }
  return nnx.state(model, nnx.Param), rules


MODELS = {
  'griffin': build_griffin,
  'gpt2': build_gpt2,
  'mamba2': build_mamba2,
}


def main() -> None:
  """Prints both tables of every model."""
  for name, build in MODELS.items():
    params, rules = build()
    print(f'\n{name}: its own initializers against gamma 0.5')
    print(audit(params, rules, gamma=0.5).table())
    params = reinit(params, jax.random.key(0), 1.0, rules)
    print(f'\n{name}: after reinit at gamma 1')
    print(audit(params, rules, gamma=1.0).table())


if __name__ == '__main__':
  main()

"""The decoder: pre-RMSNorm blocks over a residual stream.

Letters, here and in every equation of the package:
  B batch   T query length   S key length   D model   F hidden   N heads
  K kv heads   H head dim   V vocab   L layers

Parameters of the L blocks are stacked on axis 0 whether the blocks are scanned
or unrolled, so one checkpoint and one set of draws serve both.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta

from gamma_jax import attention, init_rules, layers, mlp, moe
from gamma_jax.analysis import attention_sink
from gamma_jax.config import ModelConfig

PROBE = 'probe'  # collection of diagnostics; empty unless asked for

_REMAT_POLICIES = {
  'full': jax.checkpoint_policies.nothing_saveable,
  'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def _mean_square(x: jax.Array) -> jax.Array:
  return jnp.mean(jnp.square(x.astype(jnp.float32)))


class Block(nn.Module):
  """x += attention(norm(x)); x += mlp(norm(x)), or experts for the mlp.

  Attributes:
    config: model shape and numerics.
    rule: initialization rule.
  """

  config: ModelConfig
  rule: init_rules.InitRule

  @nn.compact
  def __call__(self, x, segment_ids, positions, norm_eps):
    """Scan body: carry x [B, T, D] -> (x, RouterStats or None)."""
    c = self.config
    norm = dict(width=c.D, param_dtype=c.param_dtype)
    u = layers.RMSNorm(**norm, name='attn_norm')(x, norm_eps)
    branch = attention.Attention(c, self.rule, name='attn')(
      u, segment_ids, positions, norm_eps
    )
    x = self._add('attn', x, branch)
    if self.is_mutable_collection(attention.MECHANICS):
      ratio = attention_sink.max_activation_ratio(x, segment_ids)
      self.sow(attention.MECHANICS, 'max_activation', ratio, reduce_fn=_last)
    u = layers.RMSNorm(**norm, name='mlp_norm')(x, norm_eps)
    stats = None
    if c.moe.experts:
      branch, stats = moe.Moe(c, self.rule, name='moe')(u, segment_ids > 0)
    else:
      branch = mlp.Mlp(c, self.rule, name='mlp')(u)
    return self._add('mlp', x, branch), stats

  def _add(self, name: str, x: jax.Array, branch: jax.Array) -> jax.Array:
    if self.is_mutable_collection(PROBE):
      self.sow(PROBE, f'{name}_stream_ms', _mean_square(x), reduce_fn=_last)
      self.sow(
        PROBE, f'{name}_branch_ms', _mean_square(branch), reduce_fn=_last
      )
    x = x + branch
    return nn.with_logical_constraint(x, ('batch', 'length', 'act_embed'))


def _last(_, value):
  return value


class Transformer(nn.Module):
  """Tokens to final hidden states and the output matrix.

  The logits are left to the loss, which makes them chunk by chunk.

  Attributes:
    config: model shape and numerics.
    rule: initialization rule; may hold traced numbers.
  """

  config: ModelConfig
  rule: init_rules.InitRule

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    norm_eps=None,
  ) -> tuple[jax.Array, jax.Array]:
    """Runs the decoder.

    Args:
      tokens: [B, T] int32.
      segment_ids: [B, T] int32; documents of a row, 0 is padding.
      positions: [B, T] int32; position within the document.
      norm_eps: epsilon of every norm; None takes config.norm_eps. May be
        traced.

    Returns:
      (hidden [B, T, D] after the final norm in the compute dtype,
       head [D, V] in the parameter dtype).
    """
    c = self.config
    eps = c.norm_eps if norm_eps is None else norm_eps
    x, table = layers.Embed(
      c.V, c.D, self.rule, c.dtype, c.param_dtype, name='embed'
    )(tokens)
    x = nn.with_logical_constraint(x, ('batch', 'length', 'act_embed'))
    block = Block
    if c.remat != 'none':
      block = nn.remat(
        block, policy=_REMAT_POLICIES[c.remat], prevent_cse=False
      )
    stack = nn.scan(
      block,
      variable_axes=dict.fromkeys(
        ('params', moe.STATE, PROBE, attention.MECHANICS, attention.CACHE), 0
      ),
      split_rngs={'params': True},
      in_axes=(nn.broadcast, nn.broadcast, nn.broadcast),
      length=c.L,
      unroll=1 if c.scan else c.L,
      metadata_params={meta.PARTITION_NAME: 'layers'},
    )
    x, stats = stack(c, self.rule, name='blocks')(
      x, segment_ids, positions, eps
    )
    if stats is not None:
      self.sow(moe.STATS, 'layers', stats, reduce_fn=_last)
    if self.is_mutable_collection(PROBE):
      self.sow(PROBE, 'final_stream_ms', _mean_square(x), reduce_fn=_last)
    x = layers.RMSNorm(c.D, param_dtype=c.param_dtype, name='final_norm')(
      x, eps
    )
    if c.tied:
      return x, table.T
    return x, layers.Head(c.D, c.V, self.rule, c.param_dtype, name='head')()


def abstract_params(config: ModelConfig, rule: init_rules.InitRule):
  """Boxed parameter tree of shapes, without drawing anything."""
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  model = Transformer(config, rule)
  key = jax.eval_shape(lambda: jax.random.key(0))
  return jax.eval_shape(model.init, key, tokens, tokens, tokens)['params']

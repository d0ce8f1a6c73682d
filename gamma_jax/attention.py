"""Grouped-query attention with an optional output gate (Linen shell).

The gate is the G1 position of Qiu et al. (2505.06708): sigmoid of the
pre-normed input, multiplied into the head outputs before the output matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from gamma_jax import attend, init_rules, kernels, layers
from gamma_jax.analysis import attention_sink
from gamma_jax.config import ModelConfig

MECHANICS = 'mechanics'  # collection of measures; empty unless asked for
CACHE = 'cache'  # collection of the keys and values of earlier tokens


class Attention(nn.Module):
  """Causal self-attention over packed documents.

  Attributes:
    config: model shape and numerics.
    rule: initialization rule.
  """

  config: ModelConfig
  rule: init_rules.InitRule

  def _project(self, name: str, kind: str, equation: str, shape, names):
    return layers.Einsum(
      equation,
      shape,
      kind,
      names,
      self.rule,
      self.config.dtype,
      self.config.param_dtype,
      name=name,
    )

  def _attend(self) -> Callable:
    c = self.config
    # Where parameters are drawn one token comes, and nobody reads the result.
    if c.attention == 'blocks' or self.is_initializing():
      return functools.partial(attend.attend, block=c.attention_block)
    named = {'splash': kernels.splash, 'cudnn': kernels.cudnn}
    return kernels.over_devices(named[c.attention])

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    norm_eps,
  ) -> jax.Array:
    """[B, T, D], [B, T], [B, T], scalar -> [B, T, D]."""
    c = self.config
    heads = ('embed', 'heads', 'head_dim')
    kv_heads = ('embed', 'kv_heads', 'head_dim')
    project = self._project
    q = project('q', 'q', 'BTD,DNH->BTNH', (c.D, c.N, c.H), heads)(x)
    k = project('k', 'k', 'BTD,DKH->BTKH', (c.D, c.K, c.H), kv_heads)(x)
    v = project('v', 'v', 'BTD,DKH->BTKH', (c.D, c.K, c.H), kv_heads)(x)
    if c.qk_norm:
      norm = dict(width=c.H, name_of_axis='head_dim', param_dtype=c.param_dtype)
      q = layers.RMSNorm(**norm, name='q_norm')(q, norm_eps)
      k = layers.RMSNorm(**norm, name='k_norm')(k, norm_eps)
    q = attend.rope(q, positions, c.rope_theta)
    k = attend.rope(k, positions, c.rope_theta)
    y = self._attend_cached(q, k, v, segment_ids, positions)  # [B, T, N, H]
    self._sow(attention_sink.attention_metrics, q, k, segment_ids)
    if c.gate == 'elementwise':
      gate = project('gate', 'gate', 'BTD,DNH->BTNH', (c.D, c.N, c.H), heads)
      logits = gate(x)
      y = y * _sigmoid(logits)
      self._sow(attention_sink.gate_stats, logits, segment_ids)
    elif c.gate == 'headwise':
      gate = project(
        'gate', 'gate', 'BTD,DN->BTN', (c.D, c.N), ('embed', 'heads')
      )
      logits = gate(x)
      y = y * _sigmoid(logits)[..., None]
      self._sow(attention_sink.gate_stats, logits, segment_ids)
    out = project(
      'o',
      'o',
      'BTNH,NHD->BTD',
      (c.N, c.H, c.D),
      ('heads', 'head_dim', 'embed'),
    )
    return out(y)

  def _attend_cached(self, q, k, v, segment_ids, positions):
    """Attention to the keys of the call, or to those of a cache as well.

    A cache is filled by one call on the prompts and extended by calls of one
    token; decode.py makes it.
    """
    if self.has_variable(CACHE, 'k'):
      for name, new in (('k', k), ('v', v)):
        kept = attend.remember(self.get_variable(CACHE, name), new, positions)
        self.put_variable(CACHE, name, kept)
      if q.shape[1] == 1:
        k, v = (self.get_variable(CACHE, name) for name in 'kv')
        return attend.attend_cached(q, k, v, positions)
    return self._attend()(q, k, v, segment_ids)

  def _sow(self, measure, *args) -> None:
    if self.is_mutable_collection(MECHANICS):
      for name, value in measure(*args).items():
        self.sow(MECHANICS, name, value, reduce_fn=lambda _, new: new)


def _sigmoid(logits: jax.Array) -> jax.Array:
  return jax.nn.sigmoid(logits.astype(jnp.float32)).astype(logits.dtype)

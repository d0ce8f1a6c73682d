"""Mixture of experts in place of the MLP (Linen shell).

Router logits, softmax and losses are float32. Nothing is dropped. What a layer
reports (`route.RouterStats`) is returned, not sown, so that it passes through
scan, remat and accumulation like any other output.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from gamma_jax import dispatch, init_rules, layers, mlp, route, shapes, sharding
from gamma_jax.config import ModelConfig, MoeConfig

STATE = 'moe_state'  # collection of the balancing biases; not trained
STATS = 'moe_stats'  # collection where the model leaves RouterStats [L, ...]


class Moe(nn.Module):
  """Top-k of E experts, each a small MLP, and an optional shared one.

  Attributes:
    config: model shape and numerics.
    rule: initialization rule.
  """

  config: ModelConfig
  rule: init_rules.InitRule

  @nn.compact
  def __call__(
    self, x: jax.Array, mask: jax.Array
  ) -> tuple[jax.Array, route.RouterStats]:
    """[B, T, D], [B, T] bool (False: padding) -> ([B, T, D], stats)."""
    c, m = self.config, self.config.moe
    # In bfloat16, which is what TPUs make of float32 unless told otherwise,
    # the small logits of a small gamma would tie.
    logits = layers.Einsum(
      'BTD,DE->BTE',
      (c.D, m.experts),
      'router',
      ('embed', None),
      self.rule,
      'float32',
      c.param_dtype,
      jax.lax.Precision.HIGHEST,
      name='router',
    )(x)
    bias = None
    if m.bias_rate:
      bias = self.variable(STATE, 'bias', jnp.zeros, (m.experts,), 'float32')
    weights, experts = route.route(logits, m.top_k, bias and bias.value)
    run = functools.partial(_run, implementation=m.dispatch, block=m.block)
    if not self.is_initializing():  # init sees one token: nothing to share out
      run = over_devices(run)
    y = run(x.astype(c.dtype), weights, experts, self._kernels())
    if m.shared:
      wide = dataclasses.replace(c, F=m.shared * expert_width(c))
      y = y + mlp.Mlp(wide, self.rule, name='shared')(x)
    return y, route.router_stats(logits, experts, mask)

  def _kernels(self) -> dispatch.Kernels:
    c = self.config
    D, E, F = c.D, c.moe.experts, expert_width(c)

    def make(name, *stated):
      return Kernel(
        f'expert_{name}', *stated, self.rule, c.param_dtype, name=name
      )().astype(c.dtype)

    into = ('EMD,EDF->EMF', (E, D, F), ('expert', 'expert_embed', 'mlp'))
    out = ('EMF,EFD->EMD', (E, F, D), ('expert', 'mlp', 'expert_embed'))
    gate = make('gate', *into) if c.mlp == 'swiglu' else None
    return dispatch.Kernels(make('up', *into), gate, make('down', *out))


class Kernel(nn.Module):
  """One matrix of every expert, E first; d_in is that of one expert.

  Attributes:
    kind: what it is (init_rules.ROLE_OF_KIND).
    equation: how it would be multiplied; the fan-in is read from it.
    shape: [E, in, out].
    names: logical axis names.
    rule: initialization rule.
    param_dtype: parameter dtype.
  """

  kind: str
  equation: str
  shape: tuple[int, ...]
  names: tuple[str, ...]
  rule: init_rules.InitRule
  param_dtype: str

  @nn.compact
  def __call__(self) -> jax.Array:
    return layers.matrix(
      self,
      'kernel',
      kind=self.kind,
      axes=shapes.weight_axes(self.equation),
      shape=self.shape,
      names=self.names,
      rule=self.rule,
      dtype=self.param_dtype,
    )


def expert_width(config: ModelConfig) -> int:
  """Hidden units of one expert."""
  return config.moe.F or config.F


def _run(x, weights, experts, kernels, **options):
  """dispatch.apply_experts for [B, T, ...]."""
  flat = [a.reshape(-1, a.shape[-1]) for a in (x, weights, experts)]
  y = dispatch.apply_experts(*flat, kernels, **options)
  return y.reshape(x.shape)


# --- Devices -----------------------------------------------------------------


def over_devices(run: Callable) -> Callable:
  """`run` with batch, experts and hidden units sharded as the rules say.

  Left to itself the compiler would gather the whole batch on every device to
  sort it. Here each device sorts its own rows; those that share experts show
  each other their rows and add up what their experts make of them.
  """
  batch, expert, hidden = map(sharding.axes_in_use, ('batch', 'expert', 'mlp'))
  if not batch + expert + hidden:
    return run
  rows = jax.P(batch)
  into, out = jax.P(expert, None, hidden), jax.P(expert, hidden, None)

  def local(x, weights, experts, kernels):
    if expert:
      x, weights, experts = (
        jax.lax.all_gather(a, expert, tiled=True) for a in (x, weights, experts)
      )
      experts = experts - jax.lax.axis_index(expert) * len(kernels.up)
    shards = math.prod(jax.lax.axis_size(a) for a in expert)
    y = run(x, weights, experts, kernels, shards=shards)
    if expert:
      y = jax.lax.psum_scatter(y, expert, scatter_dimension=0, tiled=True)
    return jax.lax.psum(y, hidden) if hidden else y

  def sharded(x, weights, experts, kernels):
    gate = None if kernels.gate is None else into
    return jax.shard_map(
      local,
      in_specs=(rows, rows, rows, dispatch.Kernels(into, gate, out)),
      out_specs=rows,
      check_vma=False,
    )(x, weights, experts, kernels)

  return sharded


# --- What an update makes of it ----------------------------------------------


def initial_state(config: ModelConfig) -> dict:
  """The collection STATE of a fresh model; empty where there is no bias."""
  if not (config.moe.experts and config.moe.bias_rate):
    return {}
  bias = jnp.zeros((config.L, config.moe.experts), jnp.float32)
  return {'blocks': {'moe': {'bias': bias}}}


def weighted(stats: route.RouterStats, tokens: jax.Array) -> route.RouterStats:
  """Stats that can be added over micro-batches: balance times `tokens`.

  The balancing loss is that of a micro-batch; the update weighs each by its
  scored tokens. z_sum and load are sums already, so that a batch and its parts
  give the same.
  """
  return stats._replace(balance=stats.balance * tokens)


def auxiliary_loss(config: MoeConfig, sums: route.RouterStats) -> jax.Array:
  """Summed over tokens and layers; `sums` are `weighted` and [L, ...]."""
  balance, z = jnp.sum(sums.balance), jnp.sum(sums.z_sum)
  return config.load_balance * balance + config.router_z * z


def metrics(sums: route.RouterStats, tokens: jax.Array) -> dict:
  """Means over layers of an update; `tokens` are those of `weighted`."""
  real = jnp.maximum(sums.tokens, 1)
  out = {
    'load_balance': jnp.mean(sums.balance) / tokens,
    'router_z': jnp.mean(sums.z_sum / real),
    **route.load_metrics(sums.load),
  }
  return {f'moe/{name}': value for name, value in out.items()}


def next_state(config: MoeConfig, state: dict, sums: route.RouterStats) -> dict:
  """The biases after an update that used the experts `sums.load` times."""
  return jax.tree.map(
    lambda bias: route.balanced_bias(bias, sums.load, config.bias_rate), state
  )

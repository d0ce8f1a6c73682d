"""Linen shells that own parameters; the math beside them is plain functions.

Every parameter is made by `declare`, which boxes it with what the layer states
of it (kind, fan-in, fan-out, logical axes). Nothing downstream guesses: the
audit, the decay mask, the sharding and the metrics read these boxes.
"""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from flax.core import meta

from gamma_jax import init_rules, shapes

NORM_SCALE = 'norm_scale'  # the one kind exempt from the rule: starts at 1


class Declared(nn.LogicallyPartitioned):
  """A parameter with its layer's statement about it.

  Attributes:
    kind: a key of init_rules.ROLE_OF_KIND, or NORM_SCALE.
    fan_in: d_in of one copy (layer, expert), as its layer states it.
    fan_out: d_out of one copy.
  """

  kind: str = struct.field(default='', pytree_node=False)
  fan_in: int = struct.field(default=0, pytree_node=False)
  fan_out: int = struct.field(default=0, pytree_node=False)


def is_declared(x) -> bool:
  """True for a boxed parameter."""
  return isinstance(x, meta.AxisMetadata)


def matrix(
  module: nn.Module,
  name: str,
  *,
  kind: str,
  axes: shapes.Axes,
  shape: tuple[int, ...],
  names: tuple[str, ...],
  rule: init_rules.InitRule,
  dtype,
) -> jax.Array:
  """Makes or reads one matrix of `module`.

  Args:
    module: the Linen module that owns it.
    name: leaf name, 'kernel' or 'embedding'.
    kind: what it is (init_rules.ROLE_OF_KIND).
    axes: contracted, made and batch axes of `shape`.
    shape: full shape.
    names: logical axis name of every dimension, for sharding.
    rule: gives the std.
    dtype: parameter dtype.
  """
  fan_in, fan_out = axes.fans(shape)
  draw = rule.initializer(kind, axes)

  def init(key):
    value = draw(key, shape, dtype)
    return Declared(value, names, kind=kind, fan_in=fan_in, fan_out=fan_out)

  return module.param(name, init)


class Einsum(nn.Module):
  """y = einsum(equation, x, kernel), without bias.

  Attributes:
    equation: 'x,w->y'; the fan-in is read from it.
    shape: kernel shape.
    kind: what the kernel is (init_rules.ROLE_OF_KIND).
    names: logical axis names of the kernel.
    rule: initialization rule.
    dtype: compute dtype.
    param_dtype: parameter dtype.
    precision: of the product; None takes JAX's default.
  """

  equation: str
  shape: tuple[int, ...]
  kind: str
  names: tuple[str, ...]
  rule: init_rules.InitRule
  dtype: str = 'float32'
  param_dtype: str = 'float32'
  precision: jax.lax.Precision | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    kernel = matrix(
      self,
      'kernel',
      kind=self.kind,
      axes=shapes.weight_axes(self.equation),
      shape=self.shape,
      names=self.names,
      rule=self.rule,
      dtype=self.param_dtype,
    )
    return project(
      self.equation,
      x.astype(self.dtype),
      kernel.astype(self.dtype),
      precision=self.precision,
    )


def project(equation: str, x: jax.Array, kernel: jax.Array, precision=None):
  """`jnp.einsum(equation, x, kernel)` as one product of two matrices.

  On CPU a train step with it is up to 1.4 times as fast as with the same
  contraction over [B, T, D] (experiments/bench_project.py).

  Args:
    equation: 'x,w->y' with x = batch + in, w = in + out, y = batch + out.
    x: [batch..., in...].
    kernel: [in..., out...].
    precision: of the product; None takes JAX's default.

  Raises:
    ValueError: the equation has another form.
  """
  operands, _, y = equation.partition('->')
  lhs, _, w = operands.partition(',')
  contracted = sum(letter in lhs for letter in w)
  batch = len(lhs) - contracted
  if not (lhs[batch:] == w[:contracted] and y == lhs[:batch] + w[contracted:]):
    raise ValueError(f'{equation!r} is not batch+in,in+out->batch+out')
  d_in = math.prod(kernel.shape[:contracted])
  out = jnp.matmul(
    x.reshape(-1, d_in), kernel.reshape(d_in, -1), precision=precision
  )
  return out.reshape(*x.shape[:batch], *kernel.shape[contracted:])


def rms_norm(x: jax.Array, scale: jax.Array, eps) -> jax.Array:
  """x / sqrt(mean(x^2) + eps) * scale over the last axis, float32 inside.

  Half-precision squares under- or overflow, and 1e-12 is zero in float16, so
  the statistics and the epsilon stay in float32; the result is in x.dtype.
  """
  x32 = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
  normed = x32 * jax.lax.rsqrt(mean_square + eps)
  scale = scale.astype(jnp.float32)
  return (normed * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


class RMSNorm(nn.Module):
  """RMSNorm whose epsilon is an argument, so that it can be traced."""

  width: int
  name_of_axis: str = 'embed'
  param_dtype: str = 'float32'

  @nn.compact
  def __call__(self, x: jax.Array, eps) -> jax.Array:
    def init(_):
      ones = jnp.ones((self.width,), self.param_dtype)
      return Declared(
        ones, (self.name_of_axis,), kind=NORM_SCALE, fan_in=1, fan_out=1
      )

    return rms_norm(x, self.param('scale', init), eps)


class Embed(nn.Module):
  """Token embedding [V, D]; d_in is D, also when it is tied to the head."""

  V: int
  D: int
  rule: init_rules.InitRule
  dtype: str = 'float32'
  param_dtype: str = 'float32'

  @nn.compact
  def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[B, T] int -> ([B, T, D] in `dtype`, the table [V, D])."""
    table = matrix(
      self,
      'embedding',
      kind='embed',
      axes=shapes.Axes(in_axis=1, out_axis=0),
      shape=(self.V, self.D),
      names=('vocab', 'embed'),
      rule=self.rule,
      dtype=self.param_dtype,
    )
    return jnp.take(table, tokens, axis=0).astype(self.dtype), table


class Head(nn.Module):
  """Untied output matrix [D, V]; the loss multiplies by it chunk by chunk."""

  D: int
  V: int
  rule: init_rules.InitRule
  param_dtype: str = 'float32'

  @nn.compact
  def __call__(self) -> jax.Array:
    return matrix(
      self,
      'kernel',
      kind='head',
      axes=shapes.weight_axes('BTD,DV->BTV'),
      shape=(self.D, self.V),
      names=('embed', 'vocab'),
      rule=self.rule,
      dtype=self.param_dtype,
    )


def declarations(boxed_params) -> dict[str, Declared]:
  """Maps 'blocks/attn/q/kernel' to its box; values may be abstract.

  Raises:
    ValueError: a leaf that no layer declared.
  """
  leaves = jax.tree_util.tree_leaves_with_path(
    boxed_params, is_leaf=is_declared
  )
  out = {}
  for path, leaf in leaves:
    name = '/'.join(p.key for p in path)
    if not isinstance(leaf, Declared) or not leaf.kind:
      raise ValueError(f'parameter {name} is not declared by its layer')
    if math.prod((leaf.fan_in, leaf.fan_out)) <= 0:
      raise ValueError(f'parameter {name} states no fan-in')
    out[name] = leaf
  return out

"""Initializers with a stated fan-in: std = d_in^(-gamma).

Source: arXiv 2606.17945, W_ij ~ N(0, d_in^(-2 gamma)). gamma = 0.5 is the
usual scale, gamma = 1 is small. They follow the protocol of
jax.nn.initializers, `(key, shape, dtype, out_sharding) -> array`, so Linen,
NNX and bare JAX take them as they are. This file imports only JAX.

d_in is the product of the contracted axes and must be stated:

  parameter                    shape     in_axis   out_axis  batch_axis
  Dense, nnx.Linear            D, F      0         1
  DenseGeneral, LinearGeneral  (flat)    0         1
  multi-head attention, both   (flat)    0         1
  Einsum query kernel          D, N, H   0         (1, 2)
  Einsum output kernel         N, H, D   (0, 1)    2
  Conv kernel                  W, D, F   (0, 1)    2
  token embedding, head tied   V, D      1         0
  expert kernel, raw param     E, D, F   1         2         0
  nn.scan, nn.vmap, nnx.vmap   as inside: they hand over one copy at a time

A token embedding has d_in = D (model width): a one-hot row is not a sum over
the vocabulary. "Flat": DenseGeneral and LinearGeneral reshape their kernel to
2-D before they call the initializer, whatever their features and axes are. One
case cannot be stated by axes: with batch_dims (batch_axis in NNX) they fold
the batch into the first flat axis, so d_in would be E D. Give them the std
itself, `scaled_normal(gamma_std(D, gamma))`, or use an Einsum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from gamma_jax import shapes

Initializer = Callable[..., jax.Array]
Scalar = float | jax.Array  # a Python number or a traced float32 scalar

DISTRIBUTIONS = ('normal', 'truncated_normal')
# std of a standard normal cut at +-2; dividing by it restores the asked std.
_TRUNCATED_STD = 0.87962566103423978


def gamma_std(fan_in: int, gamma: Scalar) -> Scalar:
  """Returns fan_in^(-gamma), in float64 for numbers, float32 when traced."""
  if isinstance(gamma, (int, float)):
    return float(fan_in) ** -float(gamma)
  return jnp.power(jnp.float32(fan_in), -gamma)


def scaled_normal(
  std: Scalar, distribution: str = 'normal', dtype=jnp.float32
) -> Initializer:
  """Draws unit normals in float32, scales by `std`, casts last.

  The draw does not depend on `std`: one key gives the same directions at every
  scale, which is what makes arms of a sweep comparable as pairs.

  Args:
    std: realised standard deviation, also for 'truncated_normal'.
    distribution: 'normal', or 'truncated_normal' (cut at 2 std of the parent).
    dtype: dtype of the result unless the caller passes one.

  Raises:
    ValueError: unknown distribution; std not finite or negative.
  """
  if distribution not in DISTRIBUTIONS:
    raise ValueError(f'distribution {distribution!r}: not in {DISTRIBUTIONS}')
  if isinstance(std, (int, float)) and not 0 <= std < math.inf:
    raise ValueError(f'std must be finite and >= 0, got {std}')

  def init(key, shape, dtype=dtype, out_sharding=None) -> jax.Array:
    # Drawing in bfloat16 would cut the tails near 2.9 std and round the scale.
    if distribution == 'normal':
      unit = jax.random.normal(
        key, shape, jnp.float32, out_sharding=out_sharding
      )
    else:
      unit = jax.random.truncated_normal(
        key, -2.0, 2.0, shape, jnp.float32, out_sharding=out_sharding
      )
      unit = unit / jnp.float32(_TRUNCATED_STD)
    return (unit * jnp.float32(std)).astype(dtype or jnp.float32)

  return init


def gamma_normal(
  gamma: Scalar,
  in_axis: int | Sequence[int],
  out_axis: int | Sequence[int],
  batch_axis: int | Sequence[int] = (),
  distribution: str = 'normal',
  dtype=jnp.float32,
) -> Initializer:
  """N(0, d_in^(-2 gamma)) with d_in the product of `in_axis` (2606.17945).

  Args:
    gamma: exponent; a Python number or a traced scalar, so that one compiled
      program serves every gamma.
    in_axis: contracted axes.
    out_axis: axes that the weight makes.
    batch_axis: layer, expert and population axes; never part of d_in.
    distribution: 'normal' or 'truncated_normal'; the realised std is the same.
    dtype: dtype of the result unless the caller passes one.

  Returns:
    An initializer `(key, shape, dtype, out_sharding=None) -> array`. It raises
    ValueError when the three axis groups do not cover the shape exactly.

  Raises:
    ValueError: gamma is NaN or infinite, or the distribution is unknown.
  """
  if isinstance(gamma, (int, float)) and not math.isfinite(gamma):
    raise ValueError(f'gamma must be finite, got {gamma}')
  if distribution not in DISTRIBUTIONS:
    raise ValueError(f'distribution {distribution!r}: not in {DISTRIBUTIONS}')
  axes = shapes.Axes(in_axis, out_axis, batch_axis)

  def init(key, shape, dtype=dtype, out_sharding=None) -> jax.Array:
    fan_in, _ = axes.fans(shape)
    draw = scaled_normal(gamma_std(fan_in, gamma), distribution)
    return draw(key, shape, dtype, out_sharding)

  return init

"""Tokens to experts and back, without dropping any.

Three ways to the same numbers, chosen by name (`model.moe.dispatch`):
  blocks  tokens sorted by expert. What an even load would bring to an expert,
          and a little more, is one batched product; what an expert gets
          beyond it follows a block of rows at a time. The fast one on CPU;
          work grows with the tokens, not with the experts.
  ragged  the sorted rows in jax.lax.ragged_dot, native on GPU and TPU. On CPU
          it costs as much as all experts.
  dense   every token through every expert: the reference.

Letters: M tokens, k choices a token, E experts, C rows of an expert in the
batched product, R sorted rows (ragged: M k, one a choice; blocks: E C).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gamma_jax import mlp

# C is the mean load and so many standard deviations of a fair draw. More is
# wasted work on an even load, less is more blocks.
SPREAD = 3.0


class Kernels(NamedTuple):
  """Weights of experts; `gate` is None for GELU experts."""

  up: jax.Array  # [E, D, F]
  gate: jax.Array | None  # [E, D, F]
  down: jax.Array  # [E, F, D]


class _Order(NamedTuple):
  """The choices of all tokens, sorted by expert.

  Attributes:
    choice: [M k] token * k + choice, sorted; those of no expert here come last.
    rank: [M, k] how many of the same expert come before.
    starts: [E] first sorted choice of each expert.
    sizes: [E] choices of each expert.
  """

  choice: jax.Array
  rank: jax.Array
  starts: jax.Array
  sizes: jax.Array


class _Rows(NamedTuple):
  """Where tokens lie among rows that are multiplied together.

  Attributes:
    choice: [R] token * k + choice of each row; M k where the row is unused.
    slot: [M, k] row of each choice; R where it has none.
  """

  choice: jax.Array
  slot: jax.Array


def apply_experts(
  x: jax.Array,
  weights: jax.Array,
  experts: jax.Array,
  kernels: Kernels,
  *,
  implementation: str,
  block: int,
  shards: int = 1,
) -> jax.Array:
  """Sum over a token's choices of weight times expert(token).

  Args:
    x: [M, D].
    weights: [M, k]; used in the dtype of x.
    experts: [M, k] int; a choice outside [0, E) adds nothing.
    kernels: weights in the dtype of x.
    implementation: 'blocks', 'ragged' or 'dense'.
    block: rows multiplied at once where 'blocks' has more than C of an expert.
    shards: how many times E experts there are in all; it changes only C.

  Returns:
    [M, D] in the dtype of x.
  """
  weights = weights.astype(x.dtype)
  if implementation == 'dense':
    return _dense(x, weights, experts, kernels)
  order = _sort(experts, len(kernels.up))
  if implementation == 'ragged':
    rows = _ragged_rows(experts, order)
    multiply = functools.partial(jax.lax.ragged_dot, group_sizes=order.sizes)
    y = _expert_mlp(_gather(x, rows), kernels, multiply)
    return _combine(y, weights, rows)
  if implementation == 'blocks':
    mean = weights.size / (len(kernels.up) * shards)
    C = mean + SPREAD * math.sqrt(mean)
    C = min(8 * math.ceil(C / 8), len(x))
    x, weights, kernels, y = _beyond(block, C, x, weights, kernels, order)
    rows = _batched_rows(experts, order, C)
    batch = _gather(x, rows).reshape(-1, C, x.shape[-1])
    main = _expert_mlp(batch, kernels, _batched_dot)
    return y + _combine(main.reshape(-1, x.shape[-1]), weights, rows)
  raise ValueError(f'unknown dispatch {implementation!r}')


def _expert_mlp(x: jax.Array, kernels: Kernels, multiply) -> jax.Array:
  up = multiply(x, kernels.up)
  gate = None if kernels.gate is None else multiply(x, kernels.gate)
  return multiply(mlp.hidden_units(up, gate), kernels.down)


def _dense(x, weights, experts, kernels: Kernels) -> jax.Array:
  E = len(kernels.up)
  one_hot = jax.nn.one_hot(experts, E, dtype=x.dtype)
  share = jnp.einsum('MKE,MK->ME', one_hot, weights)
  every = jnp.broadcast_to(x[None], (E, *x.shape))
  return jnp.einsum(
    'EMD,ME->MD', _expert_mlp(every, kernels, _batched_dot), share
  )


def _batched_dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
  return jnp.einsum('ECA,EAB->ECB', x, kernel)


# --- Sorting -----------------------------------------------------------------


def _sort(experts: jax.Array, E: int) -> _Order:
  flat = experts.reshape(-1)
  flat = jnp.where((flat >= 0) & (flat < E), flat, E)
  choice = jnp.argsort(flat, stable=True).astype(jnp.int32)
  place = (
    jnp.zeros_like(choice)
    .at[choice]
    .set(jnp.arange(flat.size, dtype=jnp.int32), unique_indices=True)
  )
  sizes = jnp.bincount(flat, length=E).astype(jnp.int32)
  starts = jnp.cumsum(sizes) - sizes
  rank = place - starts.at[flat].get(mode='fill', fill_value=0)
  return _Order(choice, rank.reshape(experts.shape), starts, sizes)


def _here(experts: jax.Array, order: _Order) -> jax.Array:
  return (experts >= 0) & (experts < len(order.sizes))


def _ragged_rows(experts: jax.Array, order: _Order) -> _Rows:
  starts = order.starts.at[experts].get(mode='clip')
  slot = jnp.where(_here(experts, order), starts + order.rank, experts.size)
  used = jnp.arange(experts.size) < jnp.sum(order.sizes)
  return _Rows(jnp.where(used, order.choice, experts.size), slot)


def _batched_rows(experts: jax.Array, order: _Order, C: int) -> _Rows:
  """The first C choices of every expert."""
  E = len(order.sizes)
  inside = _here(experts, order) & (order.rank < C)
  slot = jnp.where(inside, experts * C + order.rank, E * C)
  rank = jnp.arange(C, dtype=jnp.int32)[None]
  choice = order.choice.at[order.starts[:, None] + rank].get(mode='clip')
  used = rank < order.sizes[:, None]
  return _Rows(jnp.where(used, choice, experts.size).reshape(-1), slot)


# Both ways between tokens and rows are gathers, backward too: the transpose
# that JAX would derive is a scatter-add, which runs row by row.


@jax.custom_vjp
def _gather(x: jax.Array, rows: _Rows) -> jax.Array:
  """[M, D] -> [R, D]; an unused row holds some token."""
  return x.at[rows.choice // rows.slot.shape[1]].get(mode='clip')


def _gather_bwd(rows: _Rows, d_out: jax.Array):
  return jnp.sum(_at_slots(d_out, rows), axis=1), None


_gather.defvjp(lambda x, rows: (_gather(x, rows), rows), _gather_bwd)


@jax.custom_vjp
def _combine(y: jax.Array, weights: jax.Array, rows: _Rows) -> jax.Array:
  """Rows [R, D], [M, k] -> weighted sums [M, D]."""
  return jnp.sum(_at_slots(y, rows) * weights[..., None], axis=1)


def _combine_fwd(y, weights, rows):
  return _combine(y, weights, rows), (y, weights, rows)


def _combine_bwd(saved, d_out: jax.Array):
  y, weights, rows = saved
  weight = weights.reshape(-1).at[rows.choice].get(mode='fill', fill_value=0)
  d_y = _gather(d_out, rows) * weight[:, None]
  d_weights = jnp.sum(_at_slots(y, rows) * d_out[:, None], axis=-1)
  return d_y, d_weights, None


_combine.defvjp(_combine_fwd, _combine_bwd)


def _at_slots(rows: jax.Array, where: _Rows) -> jax.Array:
  """[R, D] -> [M, k, D]; 0 for a choice without a row."""
  return rows.at[where.slot].get(mode='fill', fill_value=0)


# --- Blocks ------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _beyond(block: int, C: int, x, weights, kernels: Kernels, order: _Order):
  """What choices of rank C and more add: [M, D].

  The loop is as long as it has to be, which an even load makes not at all.
  x, weights and kernels are handed through: so the backward pass gets their
  other gradients to add to, instead of zeros to fill and sum.
  """

  def step(i, out):
    expert, part = _block(block, C, x, weights, kernels, order, i)
    y = _expert_mlp(part.x, expert, jnp.matmul) * part.weights[:, None]
    return out.at[part.token].add(y, mode='drop')

  blocks = jnp.sum(_blocks(block, C, order))
  out = jax.lax.fori_loop(0, blocks, step, jnp.zeros_like(x))
  return x, weights, kernels, out


def _beyond_fwd(block, C, x, weights, kernels, order):
  return _beyond(block, C, x, weights, kernels, order), (
    x,
    weights,
    kernels,
    order,
  )


def _beyond_bwd(block, C, saved, cotangents):
  x, weights, kernels, order = saved
  *sums, d_out = cotangents
  like = tuple(sums)
  sums = jax.tree.map(lambda d: d.astype(jnp.float32), like)

  def step(i, sums):
    d_x, d_weights, d_kernels = sums
    expert, part = _block(block, C, x, weights, kernels, order, i)
    y, back = jax.vjp(
      lambda x, expert: _expert_mlp(x, expert, jnp.matmul), part.x, expert
    )
    d_y = d_out.at[part.token].get(mode='fill', fill_value=0)
    d_weight = jnp.sum((y * d_y).astype(jnp.float32), axis=-1)
    d_part, d_expert = back(d_y * part.weights[:, None])
    d_x = d_x.at[part.token].add(d_part.astype(jnp.float32), mode='drop')
    flat = d_weights.reshape(-1).at[part.choice].add(d_weight, mode='drop')
    d_kernels = jax.tree.map(
      lambda d, new: d.at[part.expert].add(new.astype(jnp.float32)),
      d_kernels,
      d_expert,
    )
    return d_x, flat.reshape(d_weights.shape), d_kernels

  blocks = jnp.sum(_blocks(block, C, order))
  sums = jax.lax.fori_loop(0, blocks, step, sums)
  return *jax.tree.map(lambda d, old: d.astype(old.dtype), sums, like), None


_beyond.defvjp(_beyond_fwd, _beyond_bwd)


class _Block(NamedTuple):
  """Rows of one expert; past its last, indices are out of range."""

  expert: jax.Array  # scalar
  choice: jax.Array  # [block]
  token: jax.Array  # [block]
  x: jax.Array  # [block, D]
  weights: jax.Array  # [block]; 0 past the last


def _blocks(block: int, C: int, order: _Order) -> jax.Array:
  """Blocks that each expert needs beyond C rows, [E]."""
  return (jnp.maximum(order.sizes - C, 0) + block - 1) // block


def _block(block: int, C: int, x, weights, kernels, order: _Order, i):
  """The i-th block and the kernels of its expert."""
  ends = jnp.cumsum(_blocks(block, C, order))
  expert = jnp.sum(i >= ends)
  first = C + block * (i - jnp.where(expert > 0, ends[expert - 1], 0))
  rank = first + jnp.arange(block, dtype=jnp.int32)
  choice = order.choice.at[order.starts[expert] + rank].get(mode='clip')
  choice = jnp.where(rank < order.sizes[expert], choice, weights.size)
  token = choice // weights.shape[1]
  part = _Block(
    expert,
    choice,
    token,
    x.at[token].get(mode='clip'),
    weights.reshape(-1).at[choice].get(mode='fill', fill_value=0),
  )
  return jax.tree.map(lambda w: w[expert], kernels), part

"""Tokens to experts and back, without dropping any.

Three ways to the same numbers, chosen by name (`model.moe.dispatch`):
  blocks  tokens sorted by expert, multiplied a block of rows at a time. The
          fast one on CPU; work grows with the tokens, not with the experts.
  ragged  the same sorted rows in jax.lax.ragged_dot, native on GPU and TPU.
          On CPU it costs as much as all experts.
  dense   every token through every expert: the reference.

Letters: M tokens, k choices a token, E experts, R = M k sorted rows (one a
choice, and some at the end so that a block can be read past the last one).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gamma_jax import mlp


class Kernels(NamedTuple):
  """Weights of all experts; `gate` is None for GELU experts."""

  up: jax.Array  # [E, D, F]
  gate: jax.Array | None  # [E, D, F]
  down: jax.Array  # [E, F, D]


class _Plan(NamedTuple):
  """Where each choice lies among rows sorted by expert.

  Attributes:
    token: [R] token of each sorted row.
    choice: [R] token * k + choice of each sorted row.
    slot: [M, k] sorted row of each choice; past the end: of no expert here.
    sizes: [E] rows of each expert.
  """

  token: jax.Array
  choice: jax.Array
  slot: jax.Array
  sizes: jax.Array


def apply_experts(
  x: jax.Array,
  weights: jax.Array,
  experts: jax.Array,
  kernels: Kernels,
  *,
  implementation: str,
  block: int,
) -> jax.Array:
  """Sum over a token's choices of weight times expert(token).

  Args:
    x: [M, D].
    weights: [M, k]; used in the dtype of x.
    experts: [M, k] int; a choice outside [0, E) adds nothing.
    kernels: weights in the dtype of x.
    implementation: 'blocks', 'ragged' or 'dense'.
    block: rows multiplied at once by 'blocks'.

  Returns:
    [M, D] in the dtype of x.
  """
  weights = weights.astype(x.dtype)
  if implementation == 'dense':
    return _dense(x, weights, experts, kernels)
  if implementation == 'blocks':
    spare, multiply = block, functools.partial(_block_multiply, block)
  elif implementation == 'ragged':
    spare, multiply = 0, jax.lax.ragged_dot
  else:
    raise ValueError(f'unknown dispatch {implementation!r}')
  plan = _sort(experts, len(kernels.up), spare)
  rows = _gather(x, plan)
  up = multiply(rows, kernels.up, plan.sizes)
  gate = None
  if kernels.gate is not None:
    gate = multiply(rows, kernels.gate, plan.sizes)
  out = multiply(mlp.hidden_units(up, gate), kernels.down, plan.sizes)
  return _combine(out, weights, plan)


def _dense(x, weights, experts, kernels: Kernels) -> jax.Array:
  one_hot = jax.nn.one_hot(experts, len(kernels.up), dtype=x.dtype)
  share = jnp.einsum('MKE,MK->ME', one_hot, weights)
  up = jnp.einsum('MD,EDF->EMF', x, kernels.up)
  gate = None
  if kernels.gate is not None:
    gate = jnp.einsum('MD,EDF->EMF', x, kernels.gate)
  out = jnp.einsum('EMF,EFD->EMD', mlp.hidden_units(up, gate), kernels.down)
  return jnp.einsum('EMD,ME->MD', out, share)


# --- Sorting -----------------------------------------------------------------


def _sort(experts: jax.Array, n_experts: int, spare: int) -> _Plan:
  M, k = experts.shape
  flat = experts.reshape(-1)
  flat = jnp.where((flat >= 0) & (flat < n_experts), flat, n_experts)
  choice = jnp.argsort(flat, stable=True).astype(jnp.int32)
  slot = (
    jnp.zeros_like(choice)
    .at[choice]
    .set(jnp.arange(M * k, dtype=jnp.int32), unique_indices=True)
  )
  slot = jnp.where(flat < n_experts, slot, M * k + spare)
  choice = jnp.pad(choice, (0, spare))
  return _Plan(
    token=choice // k,
    choice=choice,
    slot=slot.reshape(M, k),
    sizes=jnp.bincount(flat, length=n_experts).astype(jnp.int32),
  )


# Both ways between tokens and sorted rows are gathers, backward too: the
# transpose that JAX would derive is a scatter-add, which runs row by row.


@jax.custom_vjp
def _gather(x: jax.Array, plan: _Plan) -> jax.Array:
  """[M, D] -> sorted rows [R, D]."""
  return x[plan.token]


def _gather_bwd(plan: _Plan, d_rows: jax.Array):
  return jnp.sum(_at_slots(d_rows, plan), axis=1), None


_gather.defvjp(lambda x, plan: (_gather(x, plan), plan), _gather_bwd)


@jax.custom_vjp
def _combine(rows: jax.Array, weights: jax.Array, plan: _Plan) -> jax.Array:
  """Sorted rows [R, D], [M, k] -> weighted sums [M, D]."""
  return jnp.einsum('MKD,MK->MD', _at_slots(rows, plan), weights)


def _combine_fwd(rows, weights, plan):
  return _combine(rows, weights, plan), (rows, weights, plan)


def _combine_bwd(saved, d_out: jax.Array):
  rows, weights, plan = saved
  d_rows = d_out[plan.token] * weights.reshape(-1)[plan.choice][:, None]
  d_weights = jnp.einsum('MKD,MD->MK', _at_slots(rows, plan), d_out)
  return d_rows, d_weights, None


_combine.defvjp(_combine_fwd, _combine_bwd)


def _at_slots(rows: jax.Array, plan: _Plan) -> jax.Array:
  """[R, D] -> [M, k, D]; 0 for a choice of no expert here."""
  return rows.at[plan.slot].get(mode='fill', fill_value=0)


# --- Blocks ------------------------------------------------------------------
# Experts in turn, and for each its rows, a block at a time; the loop is as
# long as the rows, so an empty expert costs nothing. The last block of an
# expert reaches into the rows of the next one, which come later and are then
# written over; in the gradient of a kernel they are masked.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _block_multiply(block: int, rows, kernel, sizes) -> jax.Array:
  """[R, A], [E, A, B], [E] -> [R, B]: each row by the kernel of its expert.

  Rows past the last expert hold anything finite.
  """

  def expert(out, xs):
    kernel, start, size = xs

    def step(i, out):
      at = start + i * block
      part = jax.lax.dynamic_slice_in_dim(rows, at, block)
      return jax.lax.dynamic_update_slice_in_dim(out, part @ kernel, at, 0)

    return jax.lax.fori_loop(0, _count(size, block), step, out), None

  out = jnp.zeros((len(rows), kernel.shape[2]), rows.dtype)
  return jax.lax.scan(expert, out, (kernel, _starts(sizes), sizes))[0]


def _block_fwd(block, rows, kernel, sizes):
  out = _block_multiply(block, rows, kernel, sizes)
  return out, (rows, kernel, sizes)


def _block_bwd(block, saved, d_out):
  rows, kernel, sizes = saved

  def expert(d_rows, xs):
    kernel, start, size = xs

    def step(i, carry):
      d_rows, d_kernel = carry
      at = start + i * block
      part = jax.lax.dynamic_slice_in_dim(rows, at, block)
      d_part = jax.lax.dynamic_slice_in_dim(d_out, at, block)
      inside = jnp.arange(block)[:, None] < size - i * block
      d_part = jnp.where(inside, d_part, jnp.zeros((), d_part.dtype))
      d_kernel += jnp.matmul(part.T, d_part, preferred_element_type=jnp.float32)
      d_rows = jax.lax.dynamic_update_slice_in_dim(
        d_rows, d_part @ kernel.T, at, 0
      )
      return d_rows, d_kernel

    zero = jnp.zeros(kernel.shape, jnp.float32)
    d_rows, d_kernel = jax.lax.fori_loop(
      0, _count(size, block), step, (d_rows, zero)
    )
    return d_rows, d_kernel.astype(kernel.dtype)

  d_rows, d_kernel = jax.lax.scan(
    expert, jnp.zeros_like(rows), (kernel, _starts(sizes), sizes)
  )
  return d_rows, d_kernel, None


_block_multiply.defvjp(_block_fwd, _block_bwd)


def _starts(sizes: jax.Array) -> jax.Array:
  return jnp.cumsum(sizes) - sizes


def _count(size: jax.Array, block: int) -> jax.Array:
  return (size + block - 1) // block

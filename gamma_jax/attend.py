"""Rotary embedding and causal grouped-query attention, as array functions.

Attention loops over blocks of queries and computes each block again in the
backward pass, so no array of T x S entries outlives one block.
Letters: see model.py; C queries of one block, G = N / K query heads a kv head.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def rope(x: jax.Array, positions: jax.Array, theta) -> jax.Array:
  """Rotates pairs (i, i + H/2) by the angle position * theta^(-2i/H).

  Args:
    x: [B, T, ..., H] with even H.
    positions: [B, T] int; position within the document.
    theta: base of the wavelengths.

  Returns:
    Like `x`; the rotation itself is float32, as bfloat16 cannot hold angles.
  """
  H = x.shape[-1]
  rate = theta ** (-jnp.arange(0, H, 2, dtype=jnp.float32) / H)
  angle = jnp.einsum('BT,J->BTJ', positions.astype(jnp.float32), rate)
  angle = jnp.expand_dims(angle, range(2, x.ndim - 1))  # [B, T, ..., H / 2]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return rotated.astype(x.dtype)


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  *,
  block: int,
) -> jax.Array:
  """Softmax attention to earlier keys of the same document.

  Earlier means a lower index in the row.

  Args:
    q: [B, T, N, H].
    k: [B, T, K, H]; K divides N, query head n reads kv head n // G.
    v: [B, T, K, H].
    segment_ids: [B, T] int; documents of a row, 0 is padding.
    block: queries whose logits exist at once; any size.

  Returns:
    [B, T, N, H] in q.dtype; zero, with zero gradient, at padding.
  """
  B, T, N, H = q.shape
  K = k.shape[2]
  q = q.reshape(B, T, K, N // K, H)
  index = jnp.arange(T, dtype=jnp.int32)
  keys = (k, v, segment_ids, index)
  if block >= T:
    one = jax.checkpoint(_attend_block)
    return one(keys, (q, segment_ids, index)).reshape(B, T, N, H)

  # The block axis comes from T, never from B or heads: those may be sharded.
  blocks = -(-T // block)
  pad = blocks * block - T
  queries = (
    _blocks_first(jnp.pad(q, [(0, 0), (0, pad)] + [(0, 0)] * 3), block),
    _blocks_first(jnp.pad(segment_ids, [(0, 0), (0, pad)]), block),
    jnp.arange(T + pad, dtype=jnp.int32).reshape(blocks, block),
  )
  # A loop cannot be merged with its recomputation, so no barrier is needed.
  one = jax.checkpoint(_attend_block, prevent_cse=False)
  out = jax.lax.map(functools.partial(one, keys), queries)
  return jnp.moveaxis(out, 0, 1).reshape(B, T + pad, N, H)[:, :T]


def remember(cache: jax.Array, new: jax.Array, positions: jax.Array):
  """Writes keys or values into the slots of their positions.

  Args:
    cache: [B, S, K, H]; slot s holds the token at position s.
    new: [B, T, K, H].
    positions: [B, T] int, below S.

  Returns:
    The cache with `new` in it.
  """
  rows = jnp.arange(len(cache), dtype=jnp.int32)[:, None]
  return cache.at[rows, positions].set(new.astype(cache.dtype))


def attend_cached(
  q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array
) -> jax.Array:
  """Attention of one token a row to all slots up to its own.

  Slots beyond it may hold anything finite, such as padding of the prompt.

  Args:
    q: [B, 1, N, H].
    k: [B, S, K, H]; its own key is in it.
    v: [B, S, K, H].
    positions: [B, 1] int; rows may be at different ones.

  Returns:
    [B, 1, N, H] in q.dtype.
  """
  B, _, N, H = q.shape
  S, K = k.shape[1:3]
  index = jnp.arange(S, dtype=jnp.int32)
  seen = (index[None] <= positions).astype(jnp.int32)
  last = jnp.full((1,), S, jnp.int32)  # later than every slot
  queries = (q.reshape(B, 1, K, N // K, H), jnp.ones_like(positions), last)
  return _attend_block((k, v, seen, index), queries).reshape(B, 1, N, H)


def _blocks_first(x: jax.Array, block: int) -> jax.Array:
  """[B, T, ...] -> [T / block, B, block, ...]."""
  B, T, *rest = x.shape
  return jnp.moveaxis(x.reshape(B, T // block, block, *rest), 1, 0)


def _attend_block(keys, queries) -> jax.Array:
  """Attention of C queries to all S keys: [B, C, K, G, H].

  Args:
    keys: (k [B, S, K, H], v [B, S, K, H], segment_ids [B, S], index [S]).
    queries: (q [B, C, K, G, H], segment_ids [B, C], index [C]).
  """
  k, v, key_segments, key_index = keys
  q, segments, index = queries
  logits = jnp.einsum(
    'BCKGH,BSKH->BKGCS', q, k, preferred_element_type=jnp.float32
  )
  logits *= q.shape[-1] ** -0.5
  same = segments[:, :, None] == key_segments[:, None, :]  # [B, C, S]
  causal = index[:, None] >= key_index[None, :]  # [C, S]
  mask = (same & causal[None])[:, None, None]  # [B, 1, 1, C, S]
  # A finite fill: -inf in a row without any key would make NaN, if only in
  # the gradient. Keys that are masked get exactly 0 unless all are.
  logits = jnp.where(mask, logits, jnp.finfo(jnp.float32).min)
  probs = jax.nn.softmax(logits, axis=-1)
  out = jnp.einsum(
    'BKGCS,BSKH->BCKGH',
    probs.astype(v.dtype),
    v,
    preferred_element_type=jnp.float32,
  )
  # A real query always has itself as a key, so only padding needs this.
  real = (segments > 0)[:, :, None, None, None]
  return jnp.where(real, out, 0.0).astype(q.dtype)

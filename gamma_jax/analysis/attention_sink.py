"""Attention sinks, gates and massive activations, from arrays.

Source: Qiu et al., arXiv 2505.06708 (share of attention on the first token,
mean gate, largest activation). The first token is that of the document, not of
the row: documents packed in a row do not see one another. A document that
continues one of an earlier row counts from its first token in this row, which
is the first that it can attend to.

Averages are over the queries of real tokens; padding (segment 0) is left out.
A quantity of which nothing is left is 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CLOSED = 0.1  # a gate below this is called closed


def attention_metrics(
  q: jax.Array,
  k: jax.Array,
  segment_ids: jax.Array,
  block: int = 128,
) -> dict[str, jax.Array]:
  """Where causal softmax attention within documents goes, per head.

  Blocks of queries one after the other: B N block T float32 scores at a time.

  Args:
    q: [B, T, N, H], after rotation; scores are q k / sqrt(H).
    k: [B, T, K, H], after rotation; head n reads kv head n // (N / K).
    segment_ids: [B, T] int32; documents of a row, 0 is padding.
    block: queries at a time.

  Returns:
    float32 [N] each: 'sink_share', mean probability on the document's first
    token (compare `uniform_floor`); 'entropy', mean in nats; 'entropy_share',
    mean of entropy / ln(visible keys), 1 where uniform, over the queries that
    see at least two keys.
  """
  B, T, N, H = q.shape
  block = min(block, T)
  pad = -T % block
  first = first_tokens(segment_ids)
  q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
  query_ids = jnp.pad(segment_ids, ((0, 0), (0, pad)))

  def blocks(x):  # [B, T, ...] -> [T / block, B, block, ...]
    x = x.reshape(B, -1, block, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  def one(args):
    q, ids, start = args
    at = start + jnp.arange(block)
    visible = (
      (ids[:, :, None] == segment_ids[:, None, :])
      & (ids > 0)[:, :, None]
      & (at[:, None] >= jnp.arange(T)[None, :])[None]
    )  # [B, block, T]
    return _block_sums(q, k, visible, first)

  starts = jnp.arange(0, T + pad, block)
  sums = jax.lax.map(one, (blocks(q), blocks(query_ids), starts))
  sink, entropy, share = (jnp.sum(x, axis=0) for x in sums)
  real = segment_ids > 0
  queries = jnp.maximum(jnp.sum(real), 1)
  choosers = jnp.maximum(jnp.sum(real & ~first), 1)
  return {
    'sink_share': sink / queries,
    'entropy': entropy / queries,
    'entropy_share': share / choosers,
  }


def _block_sums(q, k, visible, first) -> tuple[jax.Array, ...]:
  """Sums over the queries of one block -> sink, entropy, entropy share [N].

  Args:
    q: [B, block, N, H].
    k: [B, T, K, H].
    visible: [B, block, T], all False for a query of padding.
    first: [B, T].
  """
  B, _, N, H = q.shape
  K = k.shape[2]
  q = q.reshape(*q.shape[:2], K, N // K, H)
  scores = jnp.einsum(
    'BTKGH,BSKH->BKGTS', q, k, preferred_element_type=jnp.float32
  )
  mask = visible[:, None, None]
  scores = jnp.where(mask, scores * H**-0.5, -jnp.inf)
  top = jnp.max(scores, axis=-1, keepdims=True)
  # Finite also where nothing is visible, so that no NaN is ever made.
  below = jnp.where(mask, scores - jnp.where(top == -jnp.inf, 0, top), 0.0)
  weights = jnp.where(mask, jnp.exp(below), 0.0)
  total = jnp.sum(weights, axis=-1)
  total = jnp.where(total == 0, 1.0, total)
  sink = (
    jnp.sum(jnp.where(first[:, None, None, None], weights, 0.0), axis=-1)
    / total
  )
  entropy = jnp.log(total) - jnp.sum(weights * below, axis=-1) / total
  keys = jnp.sum(visible, axis=-1)[:, None, None]
  share = entropy / jnp.log(jnp.maximum(keys, 2))  # 0 with one key
  return tuple(x.sum(axis=(0, 3)).reshape(N) for x in (sink, entropy, share))


def sink_share(q, k, segment_ids, block: int = 128) -> jax.Array:
  """'sink_share' of `attention_metrics`, [N]."""
  return attention_metrics(q, k, segment_ids, block)['sink_share']


def attention_entropy(
  q, k, segment_ids, block: int = 128
) -> tuple[jax.Array, jax.Array]:
  """'entropy' and 'entropy_share' of `attention_metrics`, [N] each."""
  out = attention_metrics(q, k, segment_ids, block)
  return out['entropy'], out['entropy_share']


def first_tokens(segment_ids: jax.Array) -> jax.Array:
  """True [B, T] at the first token of every document of a row."""
  before = jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1]  # padding is 0
  return (segment_ids != before) & (segment_ids > 0)


def uniform_floor(segment_ids: jax.Array) -> jax.Array:
  """`sink_share` of uniform attention: the t-th query of a document has 1 / t.

  One document of n tokens gives H_n / n, 0.211 at n = 16 and 0.0073 at 1024.
  """
  index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
  starts = jnp.where(first_tokens(segment_ids), index, 0)
  visible = index - jax.lax.cummax(starts, axis=1) + 1
  real = segment_ids > 0
  mass = jnp.sum(jnp.where(real, 1 / visible, 0.0))
  return mass / jnp.maximum(jnp.sum(real), 1)


def gate_stats(
  logits: jax.Array, segment_ids: jax.Array | None = None
) -> dict[str, jax.Array]:
  """How far open the gates are, per head.

  Args:
    logits: before the sigmoid; [B, T, N, H] or, headwise, [B, T, N].
    segment_ids: [B, T]; None takes all tokens as real.

  Returns:
    float32 [N] each: 'gate_mean', and 'gate_closed', the share below 0.1.
  """
  gate = jax.nn.sigmoid(logits.astype(jnp.float32))
  if gate.ndim == 3:
    gate = gate[..., None]
  real = jnp.ones(gate.shape[:2], bool)
  if segment_ids is not None:
    real = segment_ids > 0
  count = jnp.maximum(jnp.sum(real), 1) * gate.shape[3]

  def mean(x):
    return jnp.sum(x, axis=(0, 1, 3), where=real[..., None, None]) / count

  return {'gate_mean': mean(gate), 'gate_closed': mean(gate < CLOSED)}


def max_activation_ratio(
  x: jax.Array, segment_ids: jax.Array | None = None
) -> jax.Array:
  """max |x| / RMS(x) of a residual stream [B, T, D], over its real tokens.

  At least 1; sqrt(D) when every token puts all of itself into one coordinate
  at one size; larger with massive activations of a few tokens.

  Args:
    x: [B, T, D].
    segment_ids: [B, T]; None takes all tokens as real.
  """
  x = jnp.abs(x.astype(jnp.float32))
  count = x.size
  if segment_ids is not None:
    real = segment_ids > 0
    x = jnp.where(real[..., None], x, 0.0)
    count = jnp.maximum(jnp.sum(real), 1) * x.shape[-1]
  largest = jnp.max(x)
  scaled = x / jnp.where(largest == 0, 1.0, largest)  # squares can underflow
  mean_square = jnp.sum(jnp.square(scaled)) / count
  return jnp.where(
    largest == 0, 0.0, jax.lax.rsqrt(jnp.where(largest == 0, 1.0, mean_square))
  )

"""Next-token cross-entropy, a chunk of tokens at a time.

Logits of all tokens would be the largest array of the program, so they are
made chunk by chunk and made again in the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class LossSums(NamedTuple):
  """Sums over scored tokens; whoever averages divides once, at the end."""

  nll_sum: jax.Array  # float32, nats
  z_sum: jax.Array  # float32, sum of logsumexp(logits)^2
  tokens: jax.Array  # int32, scored tokens
  correct: jax.Array  # int32, tokens whose label has the largest logit


def token_losses(
  hidden: jax.Array,
  head: jax.Array,
  labels: jax.Array,
  mask: jax.Array,
  *,
  chunk: int,
) -> LossSums:
  """Cross-entropy sums over the positions where `mask` holds.

  Args:
    hidden: [B, T, D], in the compute dtype; anything, NaN too, where masked.
    head: [D, V] in any float dtype; used in the dtype of `hidden`.
    labels: [B, T] int; labels[:, t] is what position t predicts.
    mask: [B, T] bool.
    chunk: tokens (over all devices) whose logits exist at once; at least one
      position of every row is taken.
  """

  def add(sums: LossSums, xs):
    hidden, labels, mask = xs
    # Zeroed before the product: a masked where() after it would still send
    # 0 * NaN into the gradients of the head.
    hidden = jnp.where(mask[..., None], hidden, jnp.zeros((), hidden.dtype))
    logits = vocab_logits(hidden, head)
    log_z, nll = _score(logits, labels)
    hit = jnp.argmax(logits, axis=-1) == labels
    terms = LossSums(
      nll_sum=jnp.sum(jnp.where(mask, nll, 0.0)),
      z_sum=jnp.sum(jnp.where(mask, jnp.square(log_z), 0.0)),
      tokens=jnp.sum(mask, dtype=jnp.int32),
      correct=jnp.sum(hit & mask, dtype=jnp.int32),
    )
    return jax.tree.map(jnp.add, sums, terms), None

  zero = LossSums(jnp.float32(0), jnp.float32(0), jnp.int32(0), jnp.int32(0))
  xs = _chunks((hidden, labels, mask), chunk)
  return jax.lax.scan(jax.checkpoint(add, prevent_cse=False), zero, xs)[0]


def token_nll(
  hidden: jax.Array, head: jax.Array, labels: jax.Array, *, chunk: int
) -> jax.Array:
  """NLL in nats of every position, float32 [B, T]; see token_losses."""

  def one(xs):
    hidden, labels = xs
    return _score(vocab_logits(hidden, head), labels)[1]

  nll = jax.lax.map(
    jax.checkpoint(one, prevent_cse=False), _chunks((hidden, labels), chunk)
  )  # [chunks, B, C]
  B, T = labels.shape
  return jnp.moveaxis(nll, 0, 1).reshape(B, -1)[:, :T]


def token_scores(
  hidden: jax.Array, head: jax.Array, labels: jax.Array, *, chunk: int
) -> tuple[jax.Array, jax.Array]:
  """NLL as `token_nll`, and whether the label has the largest logit.

  Returns:
    (float32 [B, T], bool [B, T]).
  """

  def one(xs):
    hidden, labels = xs
    logits = vocab_logits(hidden, head)
    return _score(logits, labels)[1], jnp.argmax(logits, axis=-1) == labels

  B, T = labels.shape
  scores = jax.lax.map(one, _chunks((hidden, labels), chunk))  # [chunks, B, C]
  return jax.tree.map(
    lambda x: jnp.moveaxis(x, 0, 1).reshape(B, -1)[:, :T], scores
  )


def log_probabilities(hidden: jax.Array, head: jax.Array) -> jax.Array:
  """Log-probabilities of the next token, float32 [B, V], of hidden [B, D]."""
  return jax.nn.log_softmax(vocab_logits(hidden[:, None], head)[:, 0])


def _chunks(arrays, chunk: int):
  """[B, T, ...] -> [chunks, B, C, ...] with B * C <= chunk, zeros at the end.

  Rows stay whole in B, which may be sharded: a chunk of consecutive tokens
  would lie on one device and leave the others idle.
  """
  B, T = arrays[0].shape[:2]
  count = -(-T // max(chunk // B, 1))
  C = -(-T // count)  # even chunks, so that little is padded

  def split(x):
    rest = x.shape[2:]
    x = jnp.pad(x, [(0, 0), (0, count * C - T)] + [(0, 0)] * len(rest))
    return jnp.moveaxis(x.reshape(B, count, C, *rest), 1, 0)

  return jax.tree.map(split, arrays)


def vocab_logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
  """[B, C, D], [D, V] -> float32 [B, C, V]."""
  # The cast stays inside the loop, so that the gradient of the head is summed
  # over chunks in the head's own dtype.
  B, C, D = hidden.shape
  logits = jnp.matmul(  # flat, as in layers.project
    hidden.reshape(B * C, D),
    head.astype(hidden.dtype),
    preferred_element_type=jnp.float32,
  )
  return logits.reshape(B, C, -1)


def _score(logits: jax.Array, labels: jax.Array):
  """float32 [B, C, V], int [B, C] -> (log_z [B, C], nll [B, C])."""
  log_z = jax.nn.logsumexp(logits, axis=-1)
  # Compared with an iota rather than gathered: works when V is sharded, and
  # needs no scatter, which would hold a second array of logits, backward.
  ids = jax.lax.broadcasted_iota(labels.dtype, logits.shape, 2)
  picked = jnp.where(ids == labels[..., None], logits, 0.0)
  return log_z, log_z - jnp.sum(picked, axis=-1)

"""Which experts a token goes to, and how evenly they are used.

Pure functions of router logits. Letters: E experts, k experts a token goes to;
the others as in model.py.

Convention of the weights: softmax over all experts, then divided by the sum
over the k chosen. With k=1 that would always be 1 and send the router no
gradient, so there the probability itself is the weight, as in Switch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RouterStats(NamedTuple):
  """What one router did with one batch; padding never counts.

  Attributes:
    balance: load balance loss; 1 at perfect balance.
    z_sum: sum over tokens of logsumexp(logits)^2.
    load: [E] int32, how many of the tokens' k choices each expert got.
    tokens: int32, tokens counted.
  """

  balance: jax.Array
  z_sum: jax.Array
  load: jax.Array
  tokens: jax.Array


def route(
  logits: jax.Array, top_k: int, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Picks `top_k` experts for every token.

  Exact ties are broken by position in the row, not by expert number: experts
  with small starting weights can tie for a whole batch, and would otherwise
  all lose to the first k. Logits that differ at all are not affected.

  Args:
    logits: [..., T, E] float32.
    top_k: experts per token.
    bias: [E] added to the probabilities for choosing, never for weighting.

  Returns:
    (weights float32, experts int32), both [..., T, top_k], best first.
  """
  probs = jax.nn.softmax(logits, axis=-1)
  # Without a bias the logits are compared: they tie less often than their
  # probabilities, which are all near 1/E at a small gamma.
  scores = logits if bias is None else probs + _as_last(bias, logits.ndim)
  experts = _largest(jax.lax.stop_gradient(scores), top_k)
  weights = jnp.take_along_axis(probs, experts, axis=-1)
  if top_k > 1:
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  return weights, experts


def _largest(scores: jax.Array, k: int) -> jax.Array:
  """Indices [..., T, k] of the k largest of [..., T, E], largest first."""
  T, E = scores.shape[-2:]
  # top_k prefers the first of equals, so each position sees the experts in a
  # turned order. Turning by k a position fills whole rounds.
  turn = (k * jnp.arange(T, dtype=jnp.int32)[:, None]) % E
  order = (jnp.arange(E, dtype=jnp.int32)[None] + turn) % E  # [T, E]
  order = jnp.broadcast_to(order, scores.shape)
  turn = jnp.expand_dims(turn, range(scores.ndim - 2))
  _, chosen = jax.lax.top_k(jnp.take_along_axis(scores, order, axis=-1), k)
  return (chosen + turn) % E


def load_balance_loss(probs: jax.Array, load: jax.Array, tokens) -> jax.Array:
  """E * sum_e f_e P_e (Shazeer 2017, Switch): 1 at perfect balance.

  Args:
    probs: [E] sum over tokens of the softmax over all experts.
    load: [E] choices each expert got; f is its share of them.
    tokens: how many tokens were counted; 0 gives 0.
  """
  f = load / jnp.maximum(jnp.sum(load), 1).astype(jnp.float32)
  mean = probs / jnp.maximum(tokens, 1).astype(jnp.float32)
  return load.shape[-1] * jnp.sum(f * mean)


def router_stats(
  logits: jax.Array, experts: jax.Array, mask: jax.Array
) -> RouterStats:
  """Losses and load of one router.

  Args:
    logits: [..., E] float32.
    experts: [..., k] chosen.
    mask: [...] bool, False for padding.
  """
  E = logits.shape[-1]
  # Zeroed before use: 0 * NaN of a padding token would reach the gradients.
  logits = jnp.where(mask[..., None], logits, 0.0)
  probs = jnp.where(mask[..., None], jax.nn.softmax(logits, axis=-1), 0.0)
  log_z = jnp.where(mask, jax.nn.logsumexp(logits, axis=-1), 0.0)
  every = range(mask.ndim)
  # [..., k, E]: which expert each choice of a real token went to.
  hit = experts[..., None] == _as_last(jnp.arange(E), experts.ndim + 1)
  hit &= mask[..., None, None]
  load = jnp.sum(hit, axis=range(experts.ndim), dtype=jnp.int32)
  tokens = jnp.sum(mask, dtype=jnp.int32)
  balance = load_balance_loss(jnp.sum(probs, axis=every), load, tokens)
  return RouterStats(balance, jnp.sum(jnp.square(log_z)), load, tokens)


def load_metrics(load: jax.Array) -> dict[str, jax.Array]:
  """Evenness of [..., E] loads, each averaged over the leading axes.

  Returns:
    max_load: largest load over mean load, 1 when even.
    dead_experts: share of experts that got nothing.
    load_entropy: entropy of the load over its maximum ln E, 1 when even.
  """
  E = load.shape[-1]
  total = jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1)
  share = load.astype(jnp.float32) / total.astype(jnp.float32)
  entropy = jnp.sum(jax.scipy.special.entr(share), axis=-1)
  return {
    'max_load': jnp.mean(jnp.max(share, axis=-1)) * E,
    'dead_experts': jnp.mean((load == 0).astype(jnp.float32)),
    'load_entropy': jnp.mean(entropy) / jnp.log(E) if E > 1 else jnp.ones(()),
  }


def balanced_bias(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
  """One step of balancing without a loss (DeepSeek-V3, 2412.19437).

  Args:
    bias: [..., E], as `route` takes it.
    load: [..., E] choices each expert got in the update.
    rate: how far the bias of an expert moves, up when it got too little.
  """
  load = load.astype(jnp.float32)
  return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


def _as_last(x: jax.Array, ndim: int) -> jax.Array:
  """[E] -> [1, ..., 1, E]."""
  return jnp.expand_dims(x, range(ndim - 1))

"""Text token by token, with a cache of keys and values, as pure functions.

Prompts of a batch are padded on the right, and every row goes on at its own
length. Slot s of the cache holds the token at position s, so what the padding
of a prompt left there is never seen: a query sees no slot beyond its own
position, and its own is written first. Letters: B rows, T prompt length, S
slots, V vocab, L layers, K kv heads, H head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gamma_jax import attention, losses, moe, train_step
from gamma_jax.config import Config


class Sampling(NamedTuple):
  """How tokens are drawn. A row's draws depend on its item, not on the batch.

  Greedy decoding is None in place of this.
  """

  seed: jax.Array  # uint32
  item: jax.Array  # [B] uint32
  temperature: jax.Array  # float32, above 0
  top_p: jax.Array  # float32 in (0, 1]


class Decoding(NamedTuple):
  """Where the generation of a batch stands."""

  cache: dict  # keys and values, [L, B, S, K, H] in the compute dtype
  logits: jax.Array  # [B, V] float32, of the next token
  position: jax.Array  # [B] int32, of the next token
  done: jax.Array  # [B] bool: the row has ended and writes eot
  count: jax.Array  # int32, tokens generated in this batch


def prefill(
  config: Config,
  params: dict,
  h: train_step.Hyper,
  moe_state: dict,
  prompts: dict[str, jax.Array],
  slots: int,
) -> Decoding:
  """Reads the prompts in one pass.

  Args:
    config: the shape.
    params: as in train_step.TrainState.
    h: traced numbers.
    moe_state: as in train_step.TrainState.
    prompts: 'tokens' [B, T] int32, padded on the right with anything, and
      'lengths' [B] int32; a row of length 0 is done from the start.
    slots: S, at least T and the longest prompt with all that is to come.
  """
  tokens, lengths = prompts['tokens'], prompts['lengths']
  B, T = tokens.shape
  c = config.model
  empty = jnp.zeros((c.L, B, slots, c.K, c.H), c.dtype)
  positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
  # A lone token would take the path of generated ones: the same numbers.
  hidden, head, cache = _forward(
    config,
    (params, h, moe_state, {'blocks': {'attn': {'k': empty, 'v': empty}}}),
    tokens,
    (positions < lengths[:, None]).astype(jnp.int32),
    positions,
  )
  last = jnp.maximum(lengths - 1, 0)[:, None, None]
  hidden = jnp.take_along_axis(hidden, last, axis=1)
  return Decoding(
    cache=cache,
    logits=losses.vocab_logits(hidden, head)[:, 0],
    position=lengths,
    done=lengths == 0,
    count=jnp.int32(0),
  )


def extend(
  config: Config,
  params: dict,
  h: train_step.Hyper,
  moe_state: dict,
  decoding: Decoding,
  choice: tuple[jax.Array, Sampling | None],
  steps: int,
) -> tuple[Decoding, jax.Array]:
  """Generates up to `steps` tokens a row, until every row has ended.

  Args:
    config: the shape.
    params: as in train_step.TrainState.
    h: traced numbers.
    moe_state: as in train_step.TrainState.
    decoding: from prefill, or from here.
    choice: (id of eot, how tokens are drawn).
    steps: most tokens of this call.

  Returns:
    (where it stands, tokens [B, steps] int32, eot once a row has ended).
  """
  eot, sampling = choice
  B = len(decoding.position)

  def going(carry):
    i, d, _ = carry
    return (i < steps) & ~jnp.all(d.done)

  def one(carry):
    i, d, tokens = carry
    token = jnp.where(d.done, eot, next_token(d.logits, sampling, d.count))
    tokens = jax.lax.dynamic_update_slice(tokens, token[:, None], (0, i))
    hidden, head, cache = _forward(
      config,
      (params, h, moe_state, d.cache),
      token[:, None],
      jnp.ones((B, 1), jnp.int32),
      d.position[:, None],
    )
    done = d.done | (token == eot)
    d = Decoding(
      cache=cache,
      logits=losses.vocab_logits(hidden, head)[:, 0],
      position=jnp.where(done, d.position, d.position + 1),
      done=done,
      count=d.count + 1,
    )
    return i + 1, d, tokens

  tokens = jnp.full((B, steps), eot, jnp.int32)
  start = (jnp.int32(0), decoding, tokens)
  _, decoding, tokens = jax.lax.while_loop(going, one, start)
  return decoding, tokens


def next_token(
  logits: jax.Array, sampling: Sampling | None, count: jax.Array
) -> jax.Array:
  """float32 [B, V] -> int32 [B]: the likeliest token, or a drawn one.

  Args:
    logits: of the next token.
    sampling: None for the likeliest.
    count: tokens generated before; another count gives other draws.
  """
  if sampling is None:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  logits = nucleus(logits / sampling.temperature, sampling.top_p)

  def draw(item, row):
    key = jax.random.fold_in(jax.random.key(sampling.seed), item)
    return jax.random.categorical(jax.random.fold_in(key, count), row)

  return jax.vmap(draw)(sampling.item, logits).astype(jnp.int32)


def nucleus(logits: jax.Array, top_p) -> jax.Array:
  """Logits with -inf outside the fewest tokens that hold `top_p` (1904.09751).

  Tokens as likely as the last of these stay too.
  """
  probs = jax.nn.softmax(logits, axis=-1)
  ordered = jnp.sort(probs, axis=-1, descending=True)
  before = jnp.cumsum(ordered, axis=-1) - ordered
  least = jnp.min(
    jnp.where(before < top_p, ordered, 1.0), axis=-1, keepdims=True
  )
  return jnp.where(probs >= least, logits, -jnp.inf)


def _forward(config, variables, tokens, segment_ids, positions):
  """-> (hidden [B, T, D], head [D, V], cache)."""
  params, h, moe_state, cache = variables
  (hidden, head), left = train_step.transformer(config).apply(
    {'params': params, moe.STATE: moe_state, attention.CACHE: cache},
    tokens,
    segment_ids,
    positions,
    h.norm_eps,
    mutable=[attention.CACHE],
  )
  return hidden, head, left[attention.CACHE]

"""Scores and greedy continuations of token sequences by a trained cell.

Rows are padded to few lengths and one batch size, so that few programs are
compiled. Every row is one document from position 0, as in training.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gamma_jax import losses, moe, train_step
from gamma_jax.trained import Trained

SHORTEST = 32  # length of the shortest program; the others double it


class Scorer:
  """Runs one trained cell on the default device.

  Args:
    model: the cell.
    batch_size: rows scored at once.
  """

  def __init__(self, model: Trained, batch_size: int):
    self._config, self._batch_size = model.config, batch_size
    self._variables = jax.device_put(
      {'params': model.params, moe.STATE: model.moe_state}
    )
    self._score = jax.jit(functools.partial(_score, model.config))
    self._next = jax.jit(functools.partial(_next, model.config))

  def score(
    self, rows: Sequence[Sequence[int]]
  ) -> list[tuple[np.ndarray, np.ndarray]]:
    """Scores ids 1, 2, ... of every row, each given those before it.

    Args:
      rows: ids of at least two tokens.

    Returns:
      For every row (NLL in nats, float32; whether greedy decoding would have
      chosen the id, bool), both [len(row) - 1].
    """
    out: list = [None] * len(rows)
    # Rows of one length together, so that little is padded.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
    for start in range(0, len(order), self._batch_size):
      some = order[start : start + self._batch_size]
      T = _padded(max(len(rows[i]) for i in some) - 1)
      tokens = np.zeros((self._batch_size, T + 1), np.int32)
      real = np.zeros((self._batch_size, T), np.int32)
      for b, i in enumerate(some):
        tokens[b, : len(rows[i])] = rows[i]
        real[b, : len(rows[i]) - 1] = 1
      scores = jax.device_get(self._score(self._variables, tokens, real))
      for b, i in enumerate(some):
        out[i] = tuple(x[b, : len(rows[i]) - 1] for x in scores)
    return out

  def greedy(self, prompt: Sequence[int], most: int, is_end) -> list[int]:
    """Most likely continuation, token by token, over the whole text each time.

    Args:
      prompt: ids, at least one.
      most: the most tokens to add.
      is_end: called with the new ids; True ends the text.

    Returns:
      The new ids.
    """
    new: list[int] = []
    while len(new) < most and not (new and is_end(new)):
      ids = [*prompt, *new]
      row = np.zeros((1, _padded(len(ids))), np.int32)
      row[0, : len(ids)] = ids
      new.append(int(self._next(self._variables, row, np.int32(len(ids)))))
    return new


def _padded(length: int) -> int:
  return SHORTEST * 2 ** max(-(-length // SHORTEST) - 1, 0).bit_length()


def _apply(config, variables, inputs, segment_ids):
  positions = jnp.broadcast_to(
    jnp.arange(inputs.shape[1], dtype=jnp.int32)[None], inputs.shape
  )
  return train_step.transformer(config).apply(
    variables, inputs, segment_ids, positions
  )


def _score(config, variables, tokens, real):
  """ids [B, T + 1], 1 where real [B, T] -> (NLL [B, T], hit [B, T])."""
  hidden, head = _apply(config, variables, tokens[:, :-1], real)
  return losses.token_scores(
    hidden, head, tokens[:, 1:], chunk=config.train.loss_chunk
  )


def _next(config, variables, row, length):
  """ids [1, T] of which `length` are real -> most likely next id."""
  real = (jnp.arange(row.shape[1])[None] < length).astype(jnp.int32)
  hidden, head = _apply(config, variables, row, real)
  last = jax.lax.dynamic_index_in_dim(hidden[0], length - 1, keepdims=False)
  logits = jnp.matmul(
    last, head.astype(last.dtype), preferred_element_type=jnp.float32
  )
  return jnp.argmax(logits)

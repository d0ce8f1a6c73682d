"""Held-out evaluation of a run, by what its data is: text, or anchors."""

from __future__ import annotations

from typing import Any

import numpy as np

from gamma_jax import anchor_shares, evaluate, population
from gamma_jax.config import Config
from gamma_jax.data import anchor, pipeline, tokenizer
from gamma_jax.errors import ConfigError


def check_vocabulary(config: Config) -> None:
  """Raises ConfigError where model.V has no row for every token."""
  if config.data.source == anchor.SOURCE:
    return  # done with the other limits, as it needs no file
  found = tokenizer.load_tokenizer(config.data.tokenizer)
  if found.vocab_size > config.model.V:
    raise ConfigError(
      f'model.V={config.model.V} is smaller than the vocabulary of '
      f'tokenizer {config.data.tokenizer} ({found.vocab_size})'
    )


def evaluate_members(
  config: Config, engine: population.Engine, state: Any, members: int
) -> list[dict[str, float]]:
  """Held-out metrics of each member.

  Args:
    config: of any member; they read the same held-out data.
    engine: what runs them.
    state: theirs.
    members: how many.
  """
  if config.data.source == anchor.SOURCE:
    return _anchor(config, engine, state)
  return evaluate.evaluate(
    lambda batch: engine.nll(state, batch),
    members,
    pipeline.eval_batches(
      config.data,
      seq_len=config.train.seq_len,
      batch_size=config.eval.batch_size,
      documents=config.eval.documents,
    ),
    pipeline.heldout_sources(config.data),
    tokenizer.load_tokenizer(config.data.tokenizer).token_bytes,
  )


def _anchor(config, engine, state) -> list[dict[str, float]]:
  rows = anchor.heldout_rows(config.eval.documents)
  asked, size = anchor.questions(rows), config.eval.batch_size
  count = len(rows.tokens)
  parts = []
  for start in range(0, count, size):
    # The last batch is filled up with its own rows: one shape, one compile.
    which = np.arange(start, start + size)
    which = np.where(which < count, which, start)
    parts.append(engine.answers(state, {k: v[which] for k, v in asked.items()}))
  log_p = np.concatenate(parts, axis=1)[:, :count]
  return [anchor_shares.summarize(member, rows) for member in log_p]

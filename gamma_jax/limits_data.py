"""What `data` of a config may hold, and what a source asks of the rest."""

from __future__ import annotations

import math

from gamma_jax.config import Config
from gamma_jax.errors import ConfigError


def check(config: Config) -> None:
  """Raises ConfigError at the first value of `data` that cannot be."""
  data = config.data
  for name in ('source', 'tokenizer', 'dir'):
    if not getattr(data, name):
      raise ConfigError(f'data.{name} must not be empty')
  parts = [part for part, _ in data.mixture]
  if len(set(parts)) < len(parts):
    raise ConfigError(f'data.mixture names a part twice: {", ".join(parts)}')
  for part, weight in data.mixture:
    if not 0 < weight < math.inf:
      raise ConfigError(
        f'data.mixture.{part}={weight!r} must be finite and above 0'
      )
  if data.source == 'anchor':
    _check_anchor(config)


def _check_anchor(config: Config) -> None:
  """What the composite-anchor task fixes, and what it has no use for."""
  from gamma_jax.data import anchor  # NumPy: bad flags must fail without it

  source = f'data.source={anchor.SOURCE!r}'
  if config.train.seq_len != anchor.SEQ_LEN:
    raise ConfigError(
      f'train.seq_len={config.train.seq_len} must be {anchor.SEQ_LEN}, the '
      f'length of the rows of {source}'
    )
  if config.model.V < anchor.VOCABULARY:
    raise ConfigError(
      f'model.V={config.model.V} must be at least {anchor.VOCABULARY}, the '
      f'numbers of {source}'
    )
  # They would have no effect; the config of the cell must not say otherwise.
  idle = {'tokenizer': 'none', 'mixture': (), 'workers': 0}
  for name, value in idle.items():
    if getattr(config.data, name) != value:
      raise ConfigError(
        f'data.{name} has no effect with {source}; set it to {value!r}'
      )

"""Accelerators to plan for: their memory, peak rate and names of topologies.

Imports no JAX, so that a mistyped target fails at once.
"""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

from gamma_jax.errors import ConfigError

GPUS_PER_HOST = 8


class Chip(NamedTuple):
  """One accelerator.

  Attributes:
    platform: 'tpu' or 'gpu'.
    memory: GiB that a program may use.
    peak: dense bfloat16 FLOP/s.
    example: a target.
  """

  platform: str
  memory: float
  peak: float
  example: str


# Memory of a TPU is what its compiler grants a program (libtpu 0.0.42 names it
# when it refuses one), of the H100 what the driver shows of the 80 GB. Rates
# are the makers' data sheets: Google Cloud TPU system architecture pages, and
# NVIDIA H100 SXM without sparsity.
CHIPS = {
  'v5e': Chip('tpu', 15.75, 197e12, 'v5e:8x8'),
  'v5p': Chip('tpu', 95.74, 459e12, 'v5p:4x4x4'),
  'v6e': Chip('tpu', 31.25, 918e12, 'v6e:8x8'),
  'h100': Chip('gpu', 79.1, 989e12, 'h100:64'),
}
_TOPOLOGY = {'tpu': r'\d+x\d+(x\d+)?', 'gpu': r'[1-9]\d*'}


class Target(NamedTuple):
  """Chips that are planned for.

  Attributes:
    name: as the user wrote it.
    chip: one of them.
    topology: as JAX calls it; for GPUs slices x hosts x GPUs of a host.
  """

  name: str
  chip: Chip
  topology: str


def parse(text: str) -> Target:
  """Reads `v5e:8x8` (a TPU slice) or `h100:64` (a number of GPUs).

  Raises:
    ConfigError: no such chip, or not the form of its topology.
  """
  kind, _, size = text.partition(':')
  if kind not in CHIPS:
    near = difflib.get_close_matches(kind.lower(), CHIPS, 1)
    hint = f'; did you mean {near[0]!r}?' if near else ''
    known = ', '.join(chip.example for chip in CHIPS.values())
    raise ConfigError(
      f'plan.target={text!r}: no chip {kind!r}; write for example {known}{hint}'
    )
  chip = CHIPS[kind]
  if not re.fullmatch(_TOPOLOGY[chip.platform], size):
    raise ConfigError(
      f'plan.target={text!r} does not say how many chips; write for example '
      f'{chip.example}'
    )
  if chip.platform == 'tpu':
    return Target(text, chip, text)
  count = int(size)
  if count > GPUS_PER_HOST and count % GPUS_PER_HOST:
    raise ConfigError(
      f'plan.target={text!r} must fill hosts of {GPUS_PER_HOST} GPUs'
    )
  host = min(count, GPUS_PER_HOST)
  return Target(text, chip, f'1x{count // host}x{host}')

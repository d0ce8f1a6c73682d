"""Checks that paired runs really saw the same batches and the same draws.

Pairing by seed is only worth something if one seed means one data order and one
set of unit-normal draws. A change of code, library or process count between two
runs can break that without a word.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from gamma_jax import metric_writer

BATCH = 'data/batch_crc32'


@dataclasses.dataclass(frozen=True)
class Run:
  """What one run recorded of its random numbers.

  Attributes:
    id: cell id.
    pair: runs with an equal value here must agree, such as (size, seed).
    batches: step -> hash of the batch.
    init: `init_fingerprint` of the run; empty when not recorded.
  """

  id: str
  pair: Hashable
  batches: Mapping[int, int]
  init: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Mismatch:
  """Two runs that should agree and do not."""

  a: str
  b: str
  words: str


@dataclasses.dataclass(frozen=True)
class Check:
  """What was found.

  Attributes:
    mismatches: empty when all that could be checked agrees.
    unchecked: pairs that lack the record, in words; this is not a pass.
  """

  mismatches: Sequence[Mismatch]
  unchecked: Sequence[str]


def check_common_random_numbers(runs: Iterable[Run]) -> Check:
  """Compares all runs of a pair, on the steps and parameters that both have.

  Arms may differ in length and in parameters (a gate, experts): a draw depends
  on the name and the shape of its parameter alone.
  """
  groups: dict[Hashable, list[Run]] = {}
  for run in runs:
    groups.setdefault(run.pair, []).append(run)
  mismatches, unchecked = [], []
  for group in groups.values():
    for a, b in itertools.combinations(group, 2):
      for what, unit, left, right in (
        ('batches', 'step', a.batches, b.batches),
        ('initial draws', 'parameter', a.init, b.init),
      ):
        common = [key for key in left if key in right]
        differ = [key for key in common if left[key] != right[key]]
        if not common:
          unchecked.append(f'{what} of {a.id} and {b.id}: no common {unit}')
        if differ:
          text = (
            f'{what} differ at {len(differ)} of {len(common)} {unit}s, '
            f'first at {unit} {differ[0]}'
          )
          mismatches.append(Mismatch(a.id, b.id, text))
  return Check(mismatches, unchecked)


def batch_hashes(metrics_jsonl: str | os.PathLike) -> dict[int, int]:
  """step -> hash of its batch. On several hosts, of process 0's part of it."""
  return {
    line['step']: line[BATCH]
    for line in metric_writer.read_metrics(metrics_jsonl)
    if BATCH in line
  }


def init_fingerprint(params: Mapping[str, np.ndarray]) -> dict[str, int]:
  """Name and shape of a parameter -> hash of the signs of its initial values.

  gamma scales a draw by a positive factor, which rounds in its own way but
  never changes a sign: equal draws give equal hashes at every gamma and dtype.
  """
  return {
    f'{name} {list(value.shape)}': zlib.crc32(np.packbits(np.signbit(value)))
    for name, value in params.items()
  }

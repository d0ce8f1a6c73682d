"""Batches and initial draws that cells recorded, held against each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gamma_jax import files, results
from gamma_jax.analysis import common_random_numbers
from gamma_jax.analysis.paired import json_key


def check(
  rows: Sequence[results.Row],
  shared: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> common_random_numbers.Check:
  """Whether finished cells that are compared saw the same random numbers.

  Args:
    rows: cells.
    shared: overrides -> the part, seed among it, that compared cells share.
  """
  return common_random_numbers.check_common_random_numbers(
    common_random_numbers.Run(
      id=row.id,
      pair=json_key(shared(row.overrides)),
      batches=_batches(row),
      init=_initial(row),
    )
    for row in rows
    if row.status == 'done'
  )


def _batches(row: results.Row) -> dict[int, int]:
  if not row.curve.exists():
    return {}
  return common_random_numbers.batch_hashes(row.curve)


def _initial(row: results.Row) -> dict[str, int]:
  path = row.folder / 'init_report.json'
  return files.read_json(path).get('draws', {}) if path.exists() else {}

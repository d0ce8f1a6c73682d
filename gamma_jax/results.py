"""A sweep on disk -> rows, results.csv, arms. Reads files only.

An arm is what several seeds share: all overrides but the seed.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from gamma_jax import errors, files

METRIC = 'heldout/loss'
INDICATIVE = 3  # with fewer seeds an interval is marked as indicative only


@dataclasses.dataclass(frozen=True)
class Row:
  """One cell of the sweep.

  Attributes:
    id: cell id, also its folder.
    status: done | failed | missing.
    overrides: what varies, as in sweep.json.
    numbers: deterministic results; empty unless done.
    curve: metrics.jsonl of the cell.
  """

  id: str
  status: str
  overrides: Mapping[str, Any]
  numbers: Mapping[str, int | float]
  curve: Path

  @property
  def folder(self) -> Path:
    """Where the files of the cell are."""
    return self.curve.parent


@dataclasses.dataclass(frozen=True)
class Interval:
  """Mean with its 95 % t interval.

  Attributes:
    mean: nan without a value.
    half: half-width; nan with fewer than two values.
    n: number of values.
  """

  mean: float
  half: float
  n: int


@dataclasses.dataclass(frozen=True)
class Arm:
  """Cells that differ only in seed.

  Attributes:
    label: short text of what sets this arm apart.
    overrides: all overrides but the seed.
    rows: its cells, done or not.
    values: seed -> METRIC of the finished cells where finite, nats per token.
    loss: METRIC over seeds.
  """

  label: str
  overrides: Mapping[str, Any]
  rows: Sequence[Row]
  values: Mapping[Any, float]
  loss: Interval


def collect(workdir: str | os.PathLike) -> list[Row]:
  """Cells in the order of sweep.json."""
  workdir = Path(workdir)
  index = workdir / 'sweep.json'
  if not index.exists():
    raise errors.ConfigError(
      f'{index} does not exist; --workdir must be the folder of a sweep'
    )
  return [
    _row(workdir / cell['id'], cell) for cell in files.read_json(index)['cells']
  ]


def write_results_csv(rows: Sequence[Row], path: str | os.PathLike) -> None:
  """One row a cell: id, status, overrides, numbers. No times: a resumed sweep
  and an undisturbed one give the same bytes."""
  overrides = dict.fromkeys(key for row in rows for key in row.overrides)
  numbers = dict.fromkeys(key for row in rows for key in row.numbers)
  text = io.StringIO()
  table = csv.writer(text, lineterminator='\n')
  table.writerow(['id', 'status', *overrides, *numbers])
  for row in rows:
    cells = [row.overrides.get(key) for key in overrides]
    cells += [row.numbers.get(key) for key in numbers]
    table.writerow([row.id, row.status, *map(_csv_cell, cells)])
  files.write_text(path, text.getvalue())


def summarize(rows: Sequence[Row]) -> list[Arm]:
  """Arms in order of their first cell."""
  groups: dict[str, list[Row]] = {}
  for row in rows:
    key = json.dumps(_arm_overrides(row), sort_keys=True)
    groups.setdefault(key, []).append(row)
  keys = varying([_arm_overrides(group[0]) for group in groups.values()])
  arms: list[Arm] = []
  for group in groups.values():
    values = {
      row.overrides.get('seed'): float(row.numbers[METRIC])
      for row in group
      if math.isfinite(row.numbers.get(METRIC, math.nan))
    }
    overrides = _arm_overrides(group[0])
    arms.append(
      Arm(
        label=label(overrides, keys),
        overrides=overrides,
        rows=group,
        values=values,
        loss=interval(list(values.values())),
      )
    )
  return arms


def interval(values: Sequence[float]) -> Interval:
  """95 % t interval of the mean of `values`."""
  n = len(values)
  if not n:
    return Interval(math.nan, math.nan, 0)
  mean = math.fsum(values) / n
  if n < 2:
    return Interval(mean, math.nan, n)
  variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
  half = float(stats.t.ppf(0.975, n - 1)) * math.sqrt(variance / n)
  return Interval(mean, half, n)


def label(overrides: Mapping[str, Any], keys: Sequence[str]) -> str:
  """`gamma=0.5, size=tiny`; last words of keys where they are unambiguous."""
  last = [key.rsplit('.', 1)[-1] for key in keys]
  parts = []
  for key, short in zip(keys, last, strict=True):
    if key in overrides:
      name = short if last.count(short) == 1 else key
      parts.append(f'{name}={overrides[key]}')
  return ', '.join(parts) or 'all'


def varying(arms: Sequence[Mapping[str, Any]]) -> list[str]:
  """Override keys whose value is not the same in all arms."""
  keys = dict.fromkeys(key for arm in arms for key in arm)
  return [
    key
    for key in keys
    if len({json.dumps(arm.get(key)) if key in arm else '' for arm in arms}) > 1
  ]


def _row(folder: Path, cell: Mapping[str, Any]) -> Row:
  numbers: dict[str, int | float] = {}
  results = folder / 'results.json'
  run = folder / 'run.json'
  status = 'missing'
  if results.exists():
    result = files.read_json(results)
    status = 'done' if result['status'] == 'done' else 'failed'
    if status == 'done':
      numbers = {'steps': result['steps'], **result['metrics']}
  elif run.exists():
    exit_reason = files.read_json(run)['attempts'][-1]['exit']
    if exit_reason not in (None, 'done', 'preempted'):
      status = 'failed'
  return Row(
    cell['id'], status, cell['overrides'], numbers, folder / 'metrics.jsonl'
  )


def _arm_overrides(row: Row) -> dict[str, Any]:
  return {key: value for key, value in row.overrides.items() if key != 'seed'}


def _csv_cell(value: Any) -> str:
  if value is None:
    return ''
  return value if isinstance(value, str) else repr(value)

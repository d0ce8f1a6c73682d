"""Each arm of a sweep at its own best learning rate.

A comparison at one learning rate favours the arm that it happens to suit. Rows
and arms are those of `paired`; lower is better in every metric.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gamma_jax import errors, results
from gamma_jax.analysis.paired import Overrides, json_key, words


@dataclasses.dataclass(frozen=True)
class Best:
  """One arm at its best tuned setting.

  Attributes:
    overrides: arm and tuned keys together: an arm for `paired.compare`.
    tuned: tuned keys alone.
    mean: metric over seeds. Chosen as the lowest, so a little too good.
    n: seeds.
  """

  overrides: Overrides
  tuned: Overrides
  mean: float
  n: int


def best_per_arm(
  rows: Iterable[Mapping[str, Any]],
  arm_key: str,
  tuned_keys: Sequence[str] = ('opt.lr',),
  metric: str = results.METRIC,
) -> tuple[list[Best], list[str]]:
  """Each arm (at each size or other setting) at its best tuned setting.

  Args:
    rows: finished cells.
    arm_key: such as init.gamma; warned about when its best of three or more
      values lies on the edge.
    tuned_keys: those not in the sweep are ignored. Warned about when the best
      of two or more values lies on the edge.
    metric: its mean over seeds decides.

  Returns:
    The arms in order of their first row, and warnings in plain words.
  """
  arms, warnings = _tuning_grid(rows, tuned_keys, metric)
  best = []
  for arm, grid in arms:
    # Unequal seeds are no fair race; a diverged cell must not help its value.
    most = max(len(values) for _, values in grid)
    for tuned, values in grid:
      if len(values) < most:
        warnings.append(
          f'{words({**arm, **tuned})}: {len(values)} of {most} seeds '
          'finished; not considered'
        )
    full = [(tuned, values) for tuned, values in grid if len(values) == most]
    tuned, values = min(full, key=lambda item: np.mean(item[1]))
    best.append(
      Best({**arm, **tuned}, tuned, float(np.mean(values)), len(values))
    )
    for key, value in tuned.items():
      others = [other.get(key) for other, _ in grid]
      warnings += _edge(key, value, others, arm, fewest=2)
  return best, warnings + _arm_edges(best, arm_key)


def _tuning_grid(rows, tuned_keys, metric):
  """[(arm, [(tuned overrides, values over seeds)])] and warnings."""
  arms: dict[str, tuple[dict, dict[str, tuple[dict, list[float]]]]] = {}
  warnings = []
  for row in rows:
    overrides = row['overrides']
    value = row['metrics'].get(metric, math.nan)
    if not math.isfinite(value):
      warnings.append(
        f'{words(overrides)}: {metric} is missing or not finite; left out'
      )
      continue
    tuned = {k: v for k, v in overrides.items() if k in tuned_keys}
    arm = {k: v for k, v in overrides.items() if k != 'seed' and k not in tuned}
    grid = arms.setdefault(json_key(arm), (arm, {}))[1]
    grid.setdefault(json_key(tuned), (tuned, []))[1].append(value)
  if not arms:
    raise errors.ConfigError(f'no finished cell has a finite {metric}')
  return [(arm, list(grid.values())) for arm, grid in arms.values()], warnings


def _arm_edges(best: Sequence[Best], arm_key: str) -> list[str]:
  """Warns where the best arm lies on the edge, other keys being equal."""
  groups: dict[str, tuple[dict, list[Best]]] = {}
  for item in best:
    setting = {
      k: v
      for k, v in item.overrides.items()
      if k != arm_key and k not in item.tuned
    }
    groups.setdefault(json_key(setting), (setting, []))[1].append(item)
  warnings = []
  for setting, items in groups.values():
    winner = min(items, key=lambda item: item.mean).overrides.get(arm_key)
    values = [item.overrides.get(arm_key) for item in items]
    warnings += _edge(arm_key, winner, values, setting, fewest=3)
  return warnings


def _edge(key, best, values, setting, fewest) -> list[str]:
  if not all(isinstance(v, (int, float)) for v in values):
    return []  # names have no order
  grid = sorted(set(values))
  if len(grid) < fewest or best not in (grid[0], grid[-1]):
    return []
  side = 'smallest' if best == grid[0] else 'largest'
  where = f' for {words(setting)}' if setting else ''
  return [
    f'Lowest loss{where} at {key}={best}, the {side} of {len(grid)} values: '
    'the best may lie outside of the grid.'
  ]

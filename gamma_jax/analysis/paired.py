"""Two arms of a sweep compared seed by seed.

A row is a dict of one finished cell: `overrides` as in sweep.json, `metrics`
as in results.json. An arm is the overrides that set it apart, such as
{'init.gamma': 1.0, 'opt.lr': 2e-3}.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from gamma_jax import errors, results

Overrides = Mapping[str, Any]
_NOWHERE = (math.nan, math.nan)


@dataclasses.dataclass(frozen=True)
class Unpaired:
  """A cell of one arm without a partner.

  Attributes:
    setting: its overrides but those of the arm.
    words: which arm, and what is missing.
  """

  setting: Overrides
  words: str


@dataclasses.dataclass(frozen=True)
class Pairs:
  """Cells of two arms that share the seed and all else that varies.

  Attributes:
    settings: what each of the n pairs shares.
    a: [n] metric of the first arm.
    b: [n] metric of the second arm.
    unpaired: what was left over.
  """

  settings: Sequence[Overrides]
  a: np.ndarray
  b: np.ndarray
  unpaired: Sequence[Unpaired]


@dataclasses.dataclass(frozen=True)
class PairedDifference:
  """b - a over n pairs; nan where n is too small to say.

  Attributes:
    n: pairs.
    mean: of the differences.
    sd: of the differences (n - 1 below), the input of `seeds_needed`.
    t_interval: 95 %.
    bootstrap_interval: 95 %, BCa from three pairs on. It assumes no shape, but
      is too narrow with a handful of pairs; trust the t interval there.
    p_value: two-sided t test of no difference; nan too when all n are equal.
    indicative: fewer than three pairs: do not build on it.
  """

  n: int
  mean: float
  sd: float
  t_interval: tuple[float, float]
  bootstrap_interval: tuple[float, float]
  p_value: float
  indicative: bool


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Two arms at one setting of everything else but the seed."""

  setting: Overrides
  difference: PairedDifference
  unpaired: Sequence[str]


def finished(rows: Iterable[results.Row]) -> list[dict[str, Any]]:
  """Rows of this module from the cells of a sweep that are done."""
  return [
    {'overrides': row.overrides, 'metrics': row.numbers}
    for row in rows
    if row.status == 'done'
  ]


def pair(
  rows: Iterable[Mapping[str, Any]],
  a: Overrides,
  b: Overrides,
  metric: str = results.METRIC,
) -> Pairs:
  """Pairs by seed and every other key that is in neither arm.

  A key that only one arm names must be absent in the cells of the other.

  Raises:
    ConfigError: equal arms, an arm without cells, or two cells of one arm
      with the same setting.
  """
  keys = sorted({*a, *b})
  if all(a.get(key) == b.get(key) for key in keys):
    raise errors.ConfigError(f'both arms are {words(a)}; name two')
  rows = list(rows)
  found_a, found_b = (_cells(rows, arm, keys, metric) for arm in (a, b))
  both = [
    key
    for key, (_, value) in found_a.items()
    if math.isfinite(value)
    and math.isfinite(found_b.get(key, (0, math.nan))[1])
  ]
  unpaired = []
  for arm, found, others in ((a, found_a, found_b), (b, found_b, found_a)):
    for key, (setting, value) in found.items():
      if key in both:
        continue
      if not math.isfinite(value):
        why = f'{metric} is missing or not finite'
      elif key in others:
        why = f'{metric} of the other arm is missing or not finite'
      else:
        why = 'the other arm has no such cell'
      unpaired.append(
        Unpaired(setting, f'{words(arm)} at {words(setting)}: {why}')
      )
  return Pairs(
    settings=[found_a[key][0] for key in both],
    a=np.array([found_a[key][1] for key in both], float),
    b=np.array([found_b[key][1] for key in both], float),
    unpaired=unpaired,
  )


def paired_difference(
  a: Sequence[float], b: Sequence[float], *, rng_seed: int = 0
) -> PairedDifference:
  """Statistics of b - a for paired values.

  Args:
    a: [n] values of the first arm, finite.
    b: [n] values of the second arm in the same order.
    rng_seed: of the bootstrap.
  """
  a, b = np.asarray(a, float), np.asarray(b, float)
  if a.shape != b.shape or a.ndim != 1:
    raise ValueError(f'need two lists of one length, got {a.shape}, {b.shape}')
  differences = b - a
  if not np.isfinite(differences).all():
    raise ValueError('values must be finite; take diverged runs out by name')
  n = len(differences)
  middle = results.interval(differences.tolist())
  sd = float(np.std(differences, ddof=1)) if n > 1 else math.nan
  p_value = math.nan
  if n > 1 and sd > 0:
    t = abs(middle.mean) / (sd / math.sqrt(n))
    p_value = float(2 * stats.t.sf(t, n - 1))
  return PairedDifference(
    n=n,
    mean=middle.mean,
    sd=sd,
    t_interval=(middle.mean - middle.half, middle.mean + middle.half),
    bootstrap_interval=_bootstrap(differences, rng_seed),
    p_value=p_value,
    indicative=n < results.INDICATIVE,
  )


def compare(
  rows: Iterable[Mapping[str, Any]],
  a: Overrides,
  b: Overrides,
  metric: str = results.METRIC,
) -> list[Comparison]:
  """`paired_difference` over seeds, apart for each size (or other setting).

  A setting that only one arm has comes out with n = 0 and its leftovers.
  """
  pairs = pair(rows, a, b, metric)
  groups: dict[str, tuple[Overrides, list[int], list[str]]] = {}

  def group(setting):
    setting = {key: value for key, value in setting.items() if key != 'seed'}
    return groups.setdefault(json_key(setting), (setting, [], []))

  for index, setting in enumerate(pairs.settings):
    group(setting)[1].append(index)
  for left in pairs.unpaired:
    group(left.setting)[2].append(left.words)
  return [
    Comparison(setting, paired_difference(pairs.a[at], pairs.b[at]), left_over)
    for setting, at, left_over in groups.values()
  ]


def seeds_needed(sd: float, half_width: float, confidence: float = 0.95) -> int:
  """Smallest number of pairs whose t interval is at most ± `half_width`.

  Args:
    sd: of the differences; itself uncertain when few seeds gave it.
    half_width: in the units of `sd`.
    confidence: of the interval.
  """
  if not (0 <= sd < math.inf and half_width > 0 and 0 < confidence < 1):
    raise errors.ConfigError(
      f'need sd >= 0, half_width > 0 and 0 < confidence < 1, got {sd}, '
      f'{half_width} and {confidence}'
    )
  tail = (1 + confidence) / 2
  normal = (stats.norm.ppf(tail) * sd / half_width) ** 2
  if normal > 1e9:
    raise errors.ConfigError('more than 1e9 seeds; ask for a wider interval')
  n = max(2, math.ceil(normal))  # t is wider than normal: start from below
  while stats.t.ppf(tail, n - 1) * sd / math.sqrt(n) > half_width:
    n += 1
  return n


def json_key(setting: Overrides) -> str:
  """Equal for equal settings, whatever the order of their keys."""
  return json.dumps(setting, sort_keys=True)


def words(setting: Overrides) -> str:
  """`gamma=0.5, seed=1`."""
  return results.label(setting, list(setting))


def _cells(rows, arm, keys, metric):
  """Setting as text -> (setting, metric) of the cells of one arm."""
  cells = {}
  for row in rows:
    overrides = row['overrides']
    if any(overrides.get(key) != arm.get(key) for key in keys):
      continue
    setting = {k: v for k, v in overrides.items() if k not in keys}
    text = json_key(setting)
    if text in cells:
      raise errors.ConfigError(
        f'two cells have {words(overrides)}; pass each once'
      )
    cells[text] = setting, float(row['metrics'].get(metric, math.nan))
  if not cells:
    raise errors.ConfigError(f'no finished cell has {words(arm)}')
  return cells


def _bootstrap(differences: np.ndarray, seed: int) -> tuple[float, float]:
  if len(differences) < 2:
    return _NOWHERE
  if np.ptp(differences) == 0:
    return (float(differences[0]),) * 2
  # BCa estimates skewness from leave-one-out means; two values have none.
  method = 'BCa' if len(differences) >= results.INDICATIVE else 'percentile'
  interval = stats.bootstrap(
    (differences,), np.mean, method=method, rng=np.random.default_rng(seed)
  ).confidence_interval
  return float(interval.low), float(interval.high)

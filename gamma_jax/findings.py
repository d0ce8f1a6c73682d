"""What a sweep says, in numbers: arms tuned, compared and sized. Reads files.

Overrides fall in three. What tells arms apart: the init keys that vary, or
without any all that varies but size and learning rate. What is tuned: the
learning rate, where arms are told apart by something else. What is held equal
when two arms are compared, the setting: the rest, such as size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from gamma_jax import configure, errors, files, recorded_draws, results
from gamma_jax.analysis import (
  common_random_numbers,
  effective_size,
  paired,
  tuning,
)
from gamma_jax.analysis.paired import Overrides, json_key, words

GAMMA = 'init.gamma'
SIZE = 'size'
TUNED = ('opt.lr',)
HALF_WIDTH = 0.01  # nats; the interval that seeds are counted for
FEWEST_SIZES = 3


@dataclasses.dataclass(frozen=True)
class Keys:
  """Override keys that vary, by what they are for; the rest is setting."""

  arm: Sequence[str]
  tuned: Sequence[str]

  def arm_of(self, overrides: Overrides) -> dict:
    """The part that tells arms apart."""
    return {k: v for k, v in overrides.items() if k in self.arm}

  def setting_of(self, overrides: Overrides) -> dict:
    """The part that must be equal; holds the seed if there is one."""
    return {
      k: v
      for k, v in overrides.items()
      if k not in self.arm and k not in self.tuned
    }


@dataclasses.dataclass(frozen=True)
class Entry:
  """An arm in one setting, at its best tuned value."""

  arm: Overrides
  setting: Overrides
  tuned: Overrides
  cells: results.Arm


@dataclasses.dataclass(frozen=True)
class Compared:
  """An arm minus the baseline arm, paired by seed.

  Attributes:
    arm: what tells it apart.
    setting: where both were run.
    difference: statistics of the pairs.
    seeds_needed: pairs for an interval of ± HALF_WIDTH; None when unknown.
    unpaired: cells without a partner, in words.
  """

  arm: Overrides
  setting: Overrides
  difference: paired.PairedDifference
  seeds_needed: int | None
  unpaired: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Sized:
  """Effective size of an arm against the baseline arm.

  Attributes:
    arm: what tells it apart.
    setting: where both were run, size apart.
    parameters: size -> N, non-embedding parameters.
    baseline: N -> loss of each seed.
    losses: the same of the arm.
    found: None when refused.
    refused: why, in words.
    left_out: cells left out, in words.
  """

  arm: Overrides
  setting: Overrides
  parameters: Mapping[str, int]
  baseline: effective_size.Losses
  losses: effective_size.Losses
  found: effective_size.EffectiveSize | None
  refused: str
  left_out: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Findings:
  """All there is to report.

  Attributes:
    rows: every cell.
    arms: cells that differ only in seed, tuned values apart.
    keys: what the overrides are for.
    baseline: the first arm of the sweep that has a finished cell.
    entries: finished arms at their best tuned value.
    compared: every other arm in every setting.
    sized: effective sizes; empty with fewer than three sizes.
    check: of common random numbers.
    warnings: in plain words, gravest first.
  """

  rows: Sequence[results.Row]
  arms: Sequence[results.Arm]
  keys: Keys
  baseline: Overrides
  entries: Sequence[Entry]
  compared: Sequence[Compared]
  sized: Sequence[Sized]
  check: common_random_numbers.Check
  warnings: Sequence[str]


def find(rows: Sequence[results.Row]) -> Findings:
  """Analyses the cells of a sweep, finished or not."""
  arms = results.summarize(rows)
  keys = _keys(rows)
  entries, warnings = _entries(rows, arms, keys)
  check = recorded_draws.check(rows, keys.setting_of)
  baseline = entries[0].arm if entries else {}
  wanted = keys.arm_of(rows[0].overrides) if rows else {}
  if entries and baseline != wanted:
    warnings.insert(
      0,
      f'The first arm, {words(wanted)}, has no finished cell; arms are '
      f'compared to {words(baseline)}.',
    )
  warnings = [f'{m.a} and {m.b}: {m.words}.' for m in check.mismatches] + [
    *_unfinished(rows),
    *warnings,
  ]
  compared = _compare(entries, baseline)
  return Findings(
    rows=rows,
    arms=arms,
    keys=keys,
    baseline=baseline,
    entries=entries,
    compared=compared,
    sized=_sizes(entries, baseline),
    check=check,
    warnings=warnings,
  )


def parameters(row: results.Row) -> int | None:
  """Non-embedding parameters of a cell; None without a readable config."""
  path = row.folder / 'config.json'
  if not path.exists():
    return None
  from gamma_jax import flops  # late: it imports JAX

  try:
    config = configure.from_dict(files.read_json(path))
  except errors.ConfigError:  # of another version
    return None
  return flops.parameters(config.model).non_embedding


def _keys(rows) -> Keys:
  varied = results.varying([row.overrides for row in rows])
  varied = [key for key in varied if key != 'seed']
  arm = [key for key in varied if key.startswith('init.')] or [
    key for key in varied if key not in (SIZE, *TUNED)
  ]
  tuned = [key for key in varied if key in TUNED]
  return Keys(arm, tuned) if arm else Keys(tuned, [])


def _entries(rows, arms, keys) -> tuple[list[Entry], list[str]]:
  if not any(arm.values for arm in arms):
    return [], []
  best, warnings = tuning.best_per_arm(
    paired.finished(rows), arm_key=GAMMA, tuned_keys=keys.tuned
  )
  cells = {json_key(arm.overrides): arm for arm in arms}
  entries = []
  for item in best:
    tuned = item.tuned
    entries.append(
      Entry(
        arm=keys.arm_of(item.overrides),
        setting=keys.setting_of(item.overrides),
        tuned=tuned,
        cells=cells[json_key(item.overrides)],
      )
    )
  return entries, warnings


def _compare(entries: Sequence[Entry], baseline) -> list[Compared]:
  compared = []
  for arm in _others(entries, baseline):
    rows = _tuned_rows(entries, (baseline, arm))
    for item in paired.compare(rows, baseline, arm):
      compared.append(
        Compared(
          arm=arm,
          setting=item.setting,
          difference=item.difference,
          seeds_needed=_seeds_needed(item.difference),
          unpaired=item.unpaired,
        )
      )
  # All arms of one setting together, settings in the order of the sweep.
  order = list(dict.fromkeys(json_key(e.setting) for e in entries))
  return sorted(compared, key=lambda c: order.index(json_key(c.setting)))


def _others(entries, baseline) -> list[Overrides]:
  arms = {json_key(entry.arm): entry.arm for entry in entries}
  return [arm for arm in arms.values() if arm != baseline]


def _tuned_rows(entries, arms):
  """Rows for `paired` of these arms, the tuned keys taken out."""
  return [
    {
      'overrides': {k: v for k, v in row.items() if k not in entry.tuned},
      'metrics': numbers,
    }
    for entry in entries
    if entry.arm in arms
    for row, numbers in (
      (cell.overrides, cell.numbers)
      for cell in entry.cells.rows
      if cell.status == 'done'
    )
  ]


def _seeds_needed(difference: paired.PairedDifference) -> int | None:
  if not math.isfinite(difference.sd):
    return None
  try:
    return paired.seeds_needed(difference.sd, HALF_WIDTH)
  except errors.ConfigError:  # past any count of seeds
    return None


def _sizes(entries: Sequence[Entry], baseline) -> list[Sized]:
  sizes = {entry.setting.get(SIZE) for entry in entries} - {None}
  if len(sizes) < FEWEST_SIZES:
    return []
  groups: dict[str, list[Entry]] = {}
  for entry in entries:
    groups.setdefault(json_key(_but_size(entry.setting)), []).append(entry)
  return [
    _size(group, baseline, arm)
    for group in groups.values()
    for arm in _others(group, baseline)
  ]


def _size(group: Sequence[Entry], baseline, arm) -> Sized:
  both = [entry for entry in group if entry.arm in (baseline, arm)]
  found = functools.partial(Sized, arm=arm, setting=_but_size(group[0].setting))
  try:
    counts = _parameters(both)
    pairs = paired.pair(_tuned_rows(both, (baseline, arm)), baseline, arm)
    shared = {setting[SIZE] for setting in pairs.settings}
    if len(shared) < FEWEST_SIZES:
      raise errors.ConfigError(
        f'{len(shared)} sizes have pairs of finished cells; the fit of the '
        f'baseline needs {FEWEST_SIZES}'
      )
    a, b, left = effective_size.losses_by_size(pairs, counts, SIZE)
    result = effective_size.effective_size(a, b)
  except errors.ConfigError as error:
    return found(
      parameters={},
      baseline={},
      losses={},
      found=None,
      refused=str(error),
      left_out=(),
    )
  left += [item.words for item in pairs.unpaired]
  return found(
    parameters=counts,
    baseline=a,
    losses=b,
    found=result,
    refused='',
    left_out=left,
  )


def _parameters(entries: Sequence[Entry]) -> dict[str, int]:
  """Size -> N, which all arms of a size must share."""
  counts: dict[str, int] = {}
  for entry in entries:
    size = entry.setting.get(SIZE)
    counted = (parameters(row) for row in entry.cells.rows)
    count = next((n for n in counted if n is not None), None)
    if count is None:
      raise errors.ConfigError(
        f'no cell of {words(entry.cells.overrides)} has a readable '
        'config.json to count the parameters of'
      )
    if counts.setdefault(size, count) != count:
      raise errors.ConfigError(
        f'cells of size {size} have {counts[size]} and {count} non-embedding '
        'parameters; an effective size needs arms of equal size'
      )
  return counts


def _but_size(setting: Overrides) -> dict:
  return {key: value for key, value in setting.items() if key != SIZE}


def _unfinished(rows: Sequence[results.Row]) -> list[str]:
  lines = [f'{row.id} ({row.status})' for row in rows if row.status != 'done']
  return ['Not finished: ' + '; '.join(lines) + '.'] if lines else []

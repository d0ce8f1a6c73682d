"""The tables of a report as text, and the sentences to read them by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gamma_jax import findings, results
from gamma_jax.analysis import effective_size
from gamma_jax.analysis.paired import json_key, words

BYTE = 'heldout/bits_per_byte'


class Table(NamedTuple):
  """Header and body; columns in `words` hold words, the others numbers."""

  header: Sequence[str]
  body: Sequence[Sequence[str]]
  words: Sequence[int] = (0,)


def arms(found: findings.Findings) -> Table:
  """Every arm: loss, difference to the baseline, bits per byte if it was text,
  seeds."""
  best = {json_key(e.cells.overrides): e for e in found.entries}
  differences = {
    json_key([c.arm, c.setting]): c.difference for c in found.compared
  }
  body = []
  for arm in found.arms:
    entry = best.get(json_key(arm.overrides))
    difference = entry and differences.get(json_key([entry.arm, entry.setting]))
    text = ''
    if difference is not None and difference.n:
      text = show(_interval(difference), '+')
      if difference.n < arm.loss.n:
        text += f' ({difference.n} pairs)'
    per_byte = [row.numbers.get(BYTE, math.nan) for row in arm.rows]
    per_byte = [value for value in per_byte if math.isfinite(value)]
    byte = f'{results.interval(per_byte).mean:.4f}' if per_byte else ''
    seeds = f'{arm.loss.n}'
    if arm.loss.n < len(arm.rows):
      seeds += f' of {len(arm.rows)}'
    label = arm.label
    if entry and found.keys.tuned:
      label += ' (best)'
    body.append([label, show(arm.loss), text, byte, seeds])
  header = ['arm', 'held-out loss', 'difference', 'bits per byte', 'seeds']
  if not any(line[3] for line in body):  # not of text
    header, *body = [[*x[:3], *x[4:]] for x in (header, *body)]
  return Table(header, body)


def compared(found: findings.Findings) -> Table:
  """Every paired comparison."""
  body = []
  for item in found.compared:
    d = item.difference
    body.append(
      [
        words(item.setting) if item.setting else 'all',
        words(item.arm),
        f'{d.mean:+.4f}{star(d.n)}' if d.n else 'none',
        ends(d.t_interval),
        ends(d.bootstrap_interval),
        p_value(d.p_value),
        f'{d.n}',
        '' if item.seeds_needed is None else f'{item.seeds_needed}{star(d.n)}',
      ]
    )
  header = [
    'setting',
    'arm',
    'difference',
    '95 % t interval',
    '95 % bootstrap',
    'p',
    'pairs',
    f'seeds for ± {findings.HALF_WIDTH:g}',
  ]
  return Table(header, body, words=(0, 1))


def sized(found: findings.Findings) -> Table:
  """Effective size of every arm at every size."""
  body = []
  for item in found.sized:
    name = words({**item.setting, **item.arm})
    if item.found is None:
      body.append([name, 'all', '', '', '', f'refused: {item.refused}'])
      continue
    of_size = {count: size for size, count in item.parameters.items()}
    for m in item.found.multipliers:
      note = f'refused: {m.refused}' if m.refused else ''
      if m.extrapolated:
        note = 'outside of the fitted sizes'
      body.append(
        [
          name,
          f'{of_size[m.size]}',
          f'{m.size:,.0f}',
          '' if m.refused else f'{m.multiplier:.2f}{star(item.found.seeds)}',
          '' if m.refused else ends(m.interval, '.2f'),
          note,
        ]
      )
  header = [
    'arm',
    'size',
    'N, non-embedding parameters',
    "N' / N",
    '95 % interval',
    'note',
  ]
  return Table(header, body, words=(0, 1, 5))


def notes(found: findings.Findings) -> list[str]:
  """What a reader must know to read the tables right; warnings last."""
  lines = [
    'Held-out loss in nats per token: mean over seeds ± half-width of its '
    '95 % t interval.'
  ]
  if found.compared:
    lines[0] += f' Difference: to {words(found.baseline)}, paired by seed.'
  if found.keys.tuned:
    lines.append(
      f'{", ".join(found.keys.tuned)} is tuned: each arm is compared at its '
      'best, which makes its loss a little too good.'
    )
  few = [e.cells.loss.n for e in found.entries]
  few += [c.difference.n for c in found.compared]
  if any(0 < n < results.INDICATIVE for n in few):
    lines.append(
      f'* fewer than {results.INDICATIVE} seeds: the interval is wide or '
      'missing, and indicative only.'
    )
  return [*lines, draws(found), *found.warnings]


def draws(found: findings.Findings) -> str:
  """Whether common random numbers were found common."""
  check = found.check
  if check.mismatches:
    return (
      f'Common random numbers: {len(check.mismatches)} pairs of cells DIFFER; '
      'their difference is not paired.'
    )
  text = 'Common random numbers: no pair of cells differs.'
  if check.unchecked:
    text += f' Unchecked: {len(check.unchecked)}, as {check.unchecked[0]}.'
  return text


def size_notes(found: findings.Findings) -> list[str]:
  """How the effective size was come by."""
  if not found.sized:
    return [
      f'An effective size needs {findings.FEWEST_SIZES} sizes or more (cells '
      'with a size label and finite loss).'
    ]
  lines = [
    f"N counts all parameters but the embedding and the head. N' is where the "
    f'fit of {words(found.baseline)}, L(N) = E + A N^-a, has the loss of the '
    f"arm; N' / N of 1.44 reads as 44 % larger. Refused more than a factor "
    f'{effective_size.BEYOND:g} outside of the fitted sizes.'
  ]
  for item in found.sized:
    if item.found:
      where = f' ({words(item.setting)})' if item.setting else ''
      fit = item.found.fit
      text = (
        f'Fit on the seeds that {words(item.arm)} has too{where}: '
        f'E = {fit.floor:.4f} nats, a = {fit.exponent:.3f}'
      )
      if math.isfinite(fit.rms):
        text += f', residuals {fit.rms:.1e} nats rms'
      lines.append(text + '.')
      lines += [f'{text[0].upper()}{text[1:]}.' for text in fit.warnings]
  return list(dict.fromkeys(lines))


def left_out(found: findings.Findings) -> list[str]:
  """Cells that took no part in a comparison or a fit, and why."""
  lines = [text for item in found.compared for text in item.unpaired]
  lines += [
    f'effective size of {words(item.arm)}: {text}'
    for item in found.sized
    for text in item.left_out
  ]
  return list(dict.fromkeys(lines))


def show(value: results.Interval, sign: str = '') -> str:
  """`3.1416 ± 0.0021`, a star where the interval is indicative only."""
  if not value.n:
    return 'none'
  text = f'{value.mean:{sign}.4f}'
  if value.n > 1:
    text += f' ± {value.half:.4f}'
  return text + star(value.n)


def star(n: int) -> str:
  """A star for few seeds."""
  return '*' if 0 < n < results.INDICATIVE else ''


def ends(interval: tuple[float, float], form: str = '+.4f') -> str:
  """`-0.01 to +0.02`; empty where unknown."""
  low, high = interval
  if math.isnan(low) or math.isnan(high):
    return ''
  return f'{low:{form}} to {high:{form}}'


def p_value(p: float) -> str:
  """Two digits, never 0."""
  if math.isnan(p):
    return ''
  return '< 0.0001' if p < 1e-4 else f'{p:.2g}'


def _interval(difference) -> results.Interval:
  half = difference.t_interval[1] - difference.mean
  return results.Interval(difference.mean, half, difference.n)

"""The pictures of a report: final loss, learning rates, and all the others."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

from gamma_jax import findings, report_plot_sizes, report_plot_traces, results
from gamma_jax.analysis.paired import Overrides, json_key, words
from gamma_jax.report_style import (
  INK,
  PALE,
  STYLE,
  Label,
  gammas,
  has_gamma,
  looks,
  panels,
  rest,
  save,
)

LOSS = 'held-out loss (nats per token)'
GAMMA_AXIS = r'$\gamma$   (initial std = $d_\mathrm{in}^{-\gamma}$)'


@dataclasses.dataclass(frozen=True)
class Picture:
  """A file of the report, and what it shows in words."""

  name: str
  caption: str


def draw(found: findings.Findings, folder: str | os.PathLike) -> list[Picture]:
  """Draws all there is data for, the most telling first."""
  folder = Path(folder)
  if not found.entries:
    return []
  with matplotlib.rc_context(STYLE):
    _final(found, folder / 'loss.png')
    pictures = [
      Picture(
        'loss.png',
        'Final held-out loss. Dots are seeds, rings their mean, bars 95 % t '
        'intervals; on the right the difference within each seed, which takes '
        'out what all arms of a seed share.',
      )
    ]
    if found.keys.tuned:
      _tuning(found, folder / 'lr.png')
      pictures.append(
        Picture(
          'lr.png',
          'Held-out loss by learning rate: mean over seeds, bars 95 % t '
          'intervals, filled where an arm is best. All else in this report '
          'takes each arm there.',
        )
      )
    others = [
      *report_plot_sizes.draw(found, folder),
      *report_plot_traces.draw(found, folder),
    ]
  return pictures + [Picture(name, caption) for name, caption in others]


@dataclasses.dataclass(frozen=True)
class _Places:
  """Where arms stand on the axis of gamma: rules come after the last gamma."""

  x: dict[str, float]
  ticks: list[float]
  names: list[str]
  gap: float
  numeric: bool


def _places(arms: Sequence[Overrides]) -> _Places:
  arms = list({json_key(arm): arm for arm in arms}.values())
  grid = gammas(arms)
  numeric = len(grid) > 1
  own = [arm for arm in arms if not (numeric and has_gamma(arm))]
  gap = (grid[-1] - grid[0]) / (len(grid) - 1) if numeric else 1.0
  start = grid[-1] + gap if numeric else 0.0
  x = {json_key(arm): start + gap * i for i, arm in enumerate(own)}
  names = [words(arm) for arm in own]
  ticks = list(x.values())
  if numeric:
    x |= {json_key(a): a[findings.GAMMA] for a in arms if json_key(a) not in x}
    ticks, names = grid + ticks, [f'{g:g}' for g in grid] + names
  return _Places(x, ticks, names, gap, numeric)


def _final(found: findings.Findings, path: Path) -> None:
  """Loss by gamma, one line a setting; and differences to the baseline."""
  places = _places([entry.arm for entry in found.entries])
  lines = _lines(found.entries)
  figure, axes = panels(
    2 if found.compared else 1, width=5.6, height=4.2, labels=len(lines)
  )
  labels = {axes[0]: _losses(axes[0], found, places, lines)}
  if found.compared:
    _differences(axes[1], found, places)
  for ax in axes:
    long = max(len(name) for name in places.names) > 6
    ax.set_xticks(
      places.ticks,
      places.names,
      rotation=25 if long else 0,
      ha='right' if long else 'center',
    )
    ax.margins(x=0.08)
    if places.numeric:
      ax.set_xlabel(GAMMA_AXIS)
  save(figure, labels, path)


def _lines(entries) -> dict[str, list[findings.Entry]]:
  """Entries that differ in gamma alone; a rule is a line of its own."""
  lines: dict[str, list[findings.Entry]] = {}
  for entry in entries:
    name = rest(entry.arm) if has_gamma(entry.arm) else entry.arm
    lines.setdefault(json_key([entry.setting, name]), []).append(entry)
  return lines


def _losses(ax: Axes, found, places: _Places, lines) -> list[Label]:
  labels = []
  look = looks([entry.arm for entry in found.entries])
  for line in lines.values():
    line = sorted(line, key=lambda entry: places.x[json_key(entry.arm)])
    x = [places.x[json_key(entry.arm)] for entry in line]
    y = [entry.cells.loss.mean for entry in line]
    ax.plot(x, y, color=PALE, lw=1.2, zorder=1.5)
    for entry, at in zip(line, x, strict=True):
      colour = look[json_key(entry.arm)]['color']
      loss, seeds = entry.cells.loss, list(entry.cells.values.values())
      _bar(ax, at, loss.mean, loss.half, colour)
      ax.scatter([at] * len(seeds), seeds, s=10, color=colour, lw=0, zorder=3)
      ax.scatter(at, loss.mean, s=60, ec=colour, fc='white', lw=1.4, zorder=2)
    gamma = places.numeric and has_gamma(line[-1].arm)
    what = {**line[-1].setting, **(rest(line[-1].arm) if gamma else {})}
    if what and (gamma or not places.numeric):
      labels.append((y[-1], words(what), PALE))
  ax.set_ylabel(LOSS)
  ax.set_title('Final held-out loss')
  # Without gamma every arm is a line of its own, and its tick says which.
  return labels if places.numeric else _once(labels)


def _once(labels: list[Label]) -> list[Label]:
  """The last label of each text."""
  return list({text: (y, text, colour) for y, text, colour in labels}.values())


def _differences(ax: Axes, found, places: _Places) -> None:
  """Paired differences; settings stand side by side, not upon each other."""
  look = looks([entry.arm for entry in found.entries])
  settings = list(
    {json_key(c.setting): c.setting for c in found.compared}.values()
  )
  ax.axhline(0, color=INK, lw=0.8)
  at_zero = places.x[json_key(found.baseline)]
  ax.scatter(at_zero, 0, s=40, color=look[json_key(found.baseline)]['color'])
  width = 0.3 * places.gap if len(settings) > 1 else 0
  for number, setting in enumerate(settings):
    shift = width * (number / max(1, len(settings) - 1) - 0.5)
    points = [
      (places.x[json_key(c.arm)], c.difference, c.arm)
      for c in found.compared
      if c.setting == setting and c.difference.n
    ]
    points.sort(key=lambda point: point[0])
    line = [(x, d.mean) for x, d, arm in points if has_gamma(arm)]
    if len(settings) == 1 and places.numeric and line:
      # Side by side the lines of several settings would cross without meaning.
      ax.plot(*zip(*line), color=PALE, lw=1.0, zorder=1)
    for x, difference, arm in points:
      colour = look[json_key(arm)]['color']
      half = difference.t_interval[1] - difference.mean
      _bar(ax, x + shift, difference.mean, half, colour)
      ax.scatter(x + shift, difference.mean, s=26, color=colour, zorder=3)
  ax.set_ylabel('difference (nats per token)')
  title = f'Paired by seed, minus {words(found.baseline)}; lower is better'
  if len(settings) > 1:
    title += '\nLeft to right: ' + '; '.join(map(words, settings))
  ax.set_title(title)


def _bar(ax: Axes, x: float, y: float, half: float, colour) -> None:
  if math.isfinite(half):
    ax.errorbar(x, y, half, color=colour, lw=1.3, capsize=3, zorder=2.5)


def _tuning(found: findings.Findings, path: Path) -> None:
  """Loss by learning rate, a panel a setting."""
  (key,) = found.keys.tuned
  settings = list(
    {json_key(e.setting): e.setting for e in found.entries}.values()
  )
  look = looks([entry.arm for entry in found.entries])
  best = [entry.cells.overrides for entry in found.entries]
  figure, axes = panels(len(settings), labels=len(look))
  labels: dict[Axes, list[Label]] = {}
  for ax, setting in zip(axes, settings, strict=True):
    lines: dict[str, list[results.Arm]] = {}
    for arm in found.arms:
      if found.keys.setting_of(arm.overrides) == setting and arm.values:
        name = json_key(found.keys.arm_of(arm.overrides))
        lines.setdefault(name, []).append(arm)
    labels[ax] = []
    for name, line in lines.items():
      line.sort(key=lambda arm: arm.overrides[key])
      x = [arm.overrides[key] for arm in line]
      y = [arm.loss.mean for arm in line]
      ax.plot(x, y, lw=1.3, **look[name])
      for arm in line:
        at, colour = arm.overrides[key], look[name]['color']
        _bar(ax, at, arm.loss.mean, arm.loss.half, colour)
        fill = colour if arm.overrides in best else 'white'
        ax.scatter(at, arm.loss.mean, s=40, ec=colour, fc=fill, zorder=3)
      own = found.keys.arm_of(line[-1].overrides)
      labels[ax].append((y[-1], words(own), look[name]['color']))
    ax.set_xscale('log')
    ticks = sorted(
      {arm.overrides[key] for line in lines.values() for arm in line}
    )
    ax.set_xticks(ticks, [f'{tick:g}' for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlabel('peak learning rate')
    ax.set_ylabel(LOSS)
    ax.set_title(words(setting) if setting else 'Final held-out loss')
  save(figure, labels, path)

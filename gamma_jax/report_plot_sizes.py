"""Loss by size, and how much larger a baseline model would do as well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from gamma_jax import findings
from gamma_jax.analysis.paired import json_key, words
from gamma_jax.report_style import INK, Label, file_name, looks, panels, save

AXIS = 'N, non-embedding parameters'


def draw(found: findings.Findings, folder: Path) -> list[tuple[str, str]]:
  """Files drawn, each with a caption: one for every setting but size."""
  groups: dict[str, list[findings.Sized]] = {}
  for sized in found.sized:
    if sized.found:
      groups.setdefault(json_key(sized.setting), []).append(sized)
  look = looks([entry.arm for entry in found.entries])
  drawn = []
  for group in groups.values():
    where = words(group[0].setting) if group[0].setting else ''
    name = file_name('size', group[0].setting)
    _draw(group, found.baseline, look, folder / name)
    drawn.append(
      (
        name,
        f'Effective size{", " + where if where else ""}: on the left the mean '
        'loss by N and the fit of the baseline, on the right the factor by '
        'which the baseline would have to grow to reach the loss of an arm, '
        'with 95 % intervals. Open rings are read off outside of the fitted '
        'sizes; what is refused is not drawn.',
      )
    )
  return drawn


def _draw(group: Sequence[findings.Sized], baseline, look, path: Path) -> None:
  figure, (left, right) = panels(
    2, width=5.6, height=4.2, labels=len(group) + 1
  )
  labels = {
    left: _losses(left, group, baseline, look),
    right: _multipliers(right, group, look),
  }
  counts = sorted(set(group[0].parameters.values()))
  for ax in (left, right):
    ax.set_xscale('log')
    ax.set_xticks(counts, [_short(count) for count in counts])
    ax.set_xticks([], minor=True)
    ax.set_xlabel(AXIS)
  save(figure, labels, path)


def _losses(ax: Axes, group, baseline, look) -> list[Label]:
  first = group[0]
  x = np.geomspace(*first.found.fit.sizes[[0, -1]], 100)
  colour = look[json_key(baseline)]['color']
  ax.plot(x, first.found.fit.loss(x), color=colour, lw=1.0, dashes=(4, 2))
  labels = []
  for arm, losses in [
    (baseline, first.baseline),
    *((sized.arm, sized.losses) for sized in group),
  ]:
    colour = look[json_key(arm)]['color']
    sizes = sorted(losses)
    means = [float(np.mean(losses[size])) for size in sizes]
    if arm != baseline:
      ax.plot(sizes, means, lw=1.2, **look[json_key(arm)])
    ax.scatter(sizes, means, s=26, color=colour, zorder=3)
    labels.append((means[-1], words(arm), colour))
  ax.set_ylabel('held-out loss (nats per token)')
  fit = first.found.fit
  ax.set_title(
    f'L(N) = E + A N$^{{-a}}$ of the baseline: E = {fit.floor:.3f}, '
    f'a = {fit.exponent:.2f}'
  )
  return labels


def _multipliers(ax: Axes, group, look) -> list[Label]:
  ax.axhline(1, color=INK, lw=0.8)
  labels: list[Label] = []
  width = 0.06 if len(group) > 1 else 0.0
  for number, sized in enumerate(group):
    style = look[json_key(sized.arm)]
    shift = math.exp(width * (number - (len(group) - 1) / 2))
    given = [m for m in sized.found.multipliers if not m.refused]
    x = [m.size * shift for m in given]
    y = [m.multiplier for m in given]
    ax.plot(x, y, lw=1.2, **style)
    for at, m in zip(x, given, strict=True):
      fill = 'white' if m.extrapolated else style['color']
      ax.scatter(at, m.multiplier, s=30, ec=style['color'], fc=fill, zorder=3)
      if all(map(math.isfinite, m.interval)):
        ends = np.abs(np.array(m.interval)[:, None] - m.multiplier)
        ax.errorbar(
          at, m.multiplier, ends, color=style['color'], lw=1.2, capsize=3
        )
    if given:
      labels.append((y[-1], words(sized.arm), style['color']))
  ax.set_ylabel("N' / N")
  ax.set_title('Effective size: 1.5 reads as 50 % larger')
  return labels


def _short(count: float) -> str:
  for unit, size in (('B', 1e9), ('M', 1e6), ('k', 1e3)):
    if count >= size:
      return f'{count / size:.3g}{unit}'
  return f'{count:g}'

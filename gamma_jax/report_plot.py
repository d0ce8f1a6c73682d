"""report/loss.png: final held-out loss by arm, and the way there.

gamma is a sequential colour (viridis: legible in grey and to colour-blind
readers); comparison rules are grey and dashed; labels stand at the data.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends import backend_agg
from matplotlib.figure import Figure

from gamma_jax import metric_writer, results

CURVE = 'train/loss'
SMOOTH = 0.1  # the mean at step s spans SMOOTH * s: light, none at first
GREY = '#777777'
INK = '#222222'
DASHES = ((4, 2), (1, 1.5), (6, 2, 1, 2), (2, 1), (8, 3))
LINE_POINTS = 11.0  # height of one label
STYLE = {
  'font.size': 9,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.titlelocation': 'left',
  'axes.titlesize': 10,
}
# What a line of the left panel has in common is everything but these.
X_KEYS = ('init.gamma', 'init.rule')

Label = tuple[float, str, Any]  # y in data units, text, colour


def plot(arms: Sequence[results.Arm], path: str | os.PathLike) -> None:
  """Draws both panels from the arms that have a finished cell."""
  arms = [arm for arm in arms if arm.values]
  looks = _looks(arms)
  height = max(4.2, 1.2 + len(arms) * LINE_POINTS * 1.2 / 72)
  with matplotlib.rc_context(STYLE):
    figure = Figure(figsize=(10.5, height), dpi=160, layout='constrained')
    backend_agg.FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    final = _final_by_gamma if len(_gammas(arms)) > 1 else _final_by_arm
    labels = {left: final(left, arms, looks)}
    labels[right] = _curves(right, arms, looks)
    figure.draw_without_rendering()  # settles the limits that labels need
    for ax in labels:
      _label_right(ax, labels[ax])
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def has_gamma(arm: results.Arm) -> bool:
  """True for an arm of the gamma rule, False for a comparison rule."""
  rule = arm.overrides.get('init.rule', 'gamma')
  return rule == 'gamma' and 'init.gamma' in arm.overrides


def _gammas(arms: Sequence[results.Arm]) -> list[float]:
  return sorted({arm.overrides['init.gamma'] for arm in arms if has_gamma(arm)})


def _looks(arms: Sequence[results.Arm]) -> dict[str, dict[str, Any]]:
  """Arm label -> how its lines look."""
  gammas = _gammas(arms)
  dashes = itertools.cycle(DASHES)
  viridis = matplotlib.colormaps['viridis']
  looks: dict[str, dict[str, Any]] = {}
  for number, arm in enumerate(arms):
    if len(gammas) < 2:
      share = number / max(1, len(arms) - 1)
    elif has_gamma(arm):
      span = gammas[-1] - gammas[0]
      share = (arm.overrides['init.gamma'] - gammas[0]) / span
    else:
      looks[arm.label] = {'color': GREY, 'dashes': next(dashes)}
      continue
    # The yellow end of viridis is too pale on white.
    looks[arm.label] = {'color': viridis(0.85 * share)}
  return looks


def _final_by_gamma(
  ax: Axes, arms: Sequence[results.Arm], looks: Mapping[str, Any]
) -> list[Label]:
  """Loss against gamma, one line for each setting of the other overrides."""
  labels = []
  lines: dict[str, list[results.Arm]] = {}
  for arm in arms:
    if has_gamma(arm):
      rest = {k: v for k, v in arm.overrides.items() if k not in X_KEYS}
      lines.setdefault(str(rest), []).append(arm)
    else:
      ax.axhline(arm.loss.mean, lw=1.2, **looks[arm.label])
      seeds = list(arm.values.values())
      at = ax.get_yaxis_transform()  # x in fractions of the axes
      ax.scatter([0.98] * len(seeds), seeds, s=8, color=GREY, transform=at)
      labels.append((arm.loss.mean, arm.label, GREY))
  keys = results.varying([arm.overrides for arm in arms])
  keys = [key for key in keys if key not in X_KEYS]
  for line in lines.values():
    line.sort(key=lambda arm: arm.overrides['init.gamma'])
    x = [arm.overrides['init.gamma'] for arm in line]
    y = [arm.loss.mean for arm in line]
    ax.plot(x, y, color='#bbbbbb', lw=1.2, zorder=1.5)
    for arm, at in zip(line, x, strict=True):
      colour = looks[arm.label]['color']
      seeds = list(arm.values.values())
      ax.scatter([at] * len(seeds), seeds, s=14, color=colour, lw=0, zorder=3)
      ax.scatter(at, arm.loss.mean, s=70, ec=colour, fc='none', lw=1.4)
    if len(lines) > 1:
      labels.append((y[-1], results.label(line[-1].overrides, keys), INK))
  ax.set_xticks(_gammas(arms), [f'{gamma:g}' for gamma in _gammas(arms)])
  ax.set_xlabel(r'$\gamma$   (initial std = $d_\mathrm{in}^{-\gamma}$)')
  ax.set_ylabel('held-out loss (nats per token)')
  ax.set_title('Final held-out loss: dots are seeds, rings their mean')
  return labels


def _final_by_arm(
  ax: Axes, arms: Sequence[results.Arm], looks: Mapping[str, Any]
) -> list[Label]:
  """One row an arm; its label is the tick."""
  for row, arm in enumerate(arms):
    colour = looks[arm.label]['color']
    seeds = list(arm.values.values())
    ax.scatter(seeds, [row] * len(seeds), s=14, color=colour, lw=0, zorder=3)
    ax.scatter(arm.loss.mean, row, s=70, ec=colour, fc='none', lw=1.4)
  ax.set_yticks(range(len(arms)), [arm.label for arm in arms])
  ax.set_ylim(len(arms) - 0.5, -0.5)
  ax.grid(axis='y', color='#eeeeee')
  ax.set_axisbelow(True)
  ax.set_xlabel('held-out loss (nats per token)')
  ax.set_title('Final held-out loss: dots are seeds, rings their mean')
  return []


def _curves(
  ax: Axes, arms: Sequence[results.Arm], looks: Mapping[str, Any]
) -> list[Label]:
  """Training loss by step, mean over seeds."""
  labels = []
  for arm in arms:
    steps, loss = _mean_curve(arm)
    if not len(steps):
      continue
    loss = smooth(loss)
    ax.plot(steps, loss, lw=1.3, **looks[arm.label])
    labels.append((loss[-1], arm.label, looks[arm.label]['color']))
  # Where weights start shows in the first steps; a log axis gives them room.
  ax.set_xscale('log')
  ax.xaxis.set_major_formatter('{x:g}')
  ax.margins(x=0)
  ax.set_xlabel('step (optimizer updates)')
  ax.set_ylabel('training loss (nats per token)')
  ax.set_title('Training loss: mean over seeds, smoothed over 10 % of the step')
  return labels


def _mean_curve(arm: results.Arm) -> tuple[np.ndarray, np.ndarray]:
  """Steps that every finished seed has logged, and the mean loss there."""
  curves = []
  for row in arm.rows:
    if row.status == 'done' and row.curve.exists():
      lines = metric_writer.read_metrics(row.curve)
      curves.append({m['step']: m[CURVE] for m in lines if CURVE in m})
  if not curves:
    return np.array([]), np.array([])
  steps = sorted(set.intersection(*map(set, curves)))
  loss = np.array([[curve[step] for step in steps] for curve in curves])
  return np.array(steps), loss.mean(axis=0)


def smooth(values: np.ndarray) -> np.ndarray:
  """Centred mean over SMOOTH of the index: even width on a log axis."""
  at = np.arange(len(values))
  half = (at * SMOOTH / 2).astype(int)
  low, high = at - half, np.minimum(at + half + 1, len(values))
  total = np.concatenate([[0.0], np.cumsum(values)])
  return (total[high] - total[low]) / (high - low)


def _label_right(ax: Axes, labels: Sequence[Label]) -> None:
  """Writes labels beside the axes, moved apart where they would collide."""
  if not labels:
    return
  labels = sorted(labels, key=lambda item: item[0])
  points = 72 / ax.figure.dpi
  bottom, top = (edge * points for edge in ax.get_window_extent().intervaly)
  y = ax.transData.transform([(0, at) for at, _, _ in labels])[:, 1] * points
  # Above the axis if there is room, so that tick labels stay free.
  lift = spread(y) - LINE_POINTS * np.arange(len(y))
  free = max(bottom, top - LINE_POINTS * (len(y) - 1))
  placed = np.clip(lift, bottom, free) + LINE_POINTS * np.arange(len(y))
  for (at, text, colour), shift in zip(labels, placed - y, strict=True):
    ax.annotate(
      text,
      xy=(1, at),
      xycoords=('axes fraction', 'data'),
      xytext=(26, shift),
      textcoords='offset points',
      va='center',
      color=INK,
      fontsize=8,
      annotation_clip=False,
      arrowprops={
        'arrowstyle': '-',
        'color': colour,
        'lw': 1.3,
        'patchA': None,
        'shrinkA': 3,
        'shrinkB': 1,
        'relpos': (0, 0.5),
      },
    )


def spread(y: np.ndarray, gap: float = LINE_POINTS) -> np.ndarray:
  """Moves sorted positions apart to `gap`, each cluster about its mean."""
  # Least squares under y[i+1] - y[i] >= gap: pool adjacent violators.
  blocks: list[list[float]] = []  # sum, size
  for value in y - gap * np.arange(len(y)):
    blocks.append([value, 1])
    while len(blocks) > 1 and (
      blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]
    ):
      total, size = blocks.pop()
      blocks[-1][0] += total
      blocks[-1][1] += size
  flat = [total / size for total, size in blocks for _ in range(int(size))]
  return np.array(flat) + gap * np.arange(len(y))

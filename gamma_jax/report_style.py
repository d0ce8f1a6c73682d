"""How the plots of a report look: colours, panels, labels beside the lines.

gamma is a sequential colour (viridis: legible in grey and to colour-blind
readers); comparison rules are grey and dashed; labels stand at the data.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends import backend_agg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from gamma_jax import findings
from gamma_jax.analysis.paired import Overrides, json_key, words

GREY = '#777777'
PALE = '#bbbbbb'
INK = '#222222'
DASHES = ((4, 2), (1, 1.5), (6, 2, 1, 2), (2, 1), (8, 3))
LINE_POINTS = 11.0  # height of one label
COLUMNS = 3
STYLE = {
  'font.size': 9,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.titlelocation': 'left',
  'axes.titlesize': 10,
}

Label = tuple[float, str, Any]  # y in data units, text, colour


def has_gamma(arm: Overrides) -> bool:
  """True for an arm of the gamma rule, False for a comparison rule."""
  return arm.get('init.rule', 'gamma') == 'gamma' and findings.GAMMA in arm


def gammas(arms: Sequence[Overrides]) -> list[float]:
  """Those of the gamma rule, growing."""
  return sorted({arm[findings.GAMMA] for arm in arms if has_gamma(arm)})


def rest(arm: Overrides) -> dict:
  """What tells an arm apart besides gamma."""
  return {
    key: value
    for key, value in arm.items()
    if key not in (findings.GAMMA, 'init.rule')
  }


def looks(arms: Sequence[Overrides]) -> dict[str, dict[str, Any]]:
  """`json_key` of an arm -> how its lines look."""
  arms = list({json_key(arm): arm for arm in arms}.values())
  grid = gammas(arms)
  viridis = matplotlib.colormaps['viridis']
  rules = itertools.cycle(DASHES)
  variants = list(dict.fromkeys(json_key(rest(arm)) for arm in arms))
  found: dict[str, dict[str, Any]] = {}
  for number, arm in enumerate(arms):
    look: dict[str, Any] = {}
    if len(grid) < 2:
      share = number / max(1, len(arms) - 1)
    elif has_gamma(arm):
      share = (arm[findings.GAMMA] - grid[0]) / (grid[-1] - grid[0])
      variant = variants.index(json_key(rest(arm)))
      if variant:
        look['dashes'] = DASHES[(variant - 1) % len(DASHES)]
    else:
      found[json_key(arm)] = {'color': GREY, 'dashes': next(rules)}
      continue
    # The yellow end of viridis is too pale on white.
    found[json_key(arm)] = {'color': viridis(0.85 * share), **look}
  return found


def panels(
  count: int, *, width: float = 4.8, height: float = 3.6, labels: int = 0
) -> tuple[Figure, list[Axes]]:
  """A figure with `count` panels, tall enough for `labels` labels in each."""
  columns = min(count, COLUMNS)
  if columns == COLUMNS:
    width *= 0.85  # the page shows all widths alike; keep the letters large
  lines = -(-count // columns)
  height = max(height, 1.0 + labels * LINE_POINTS * 1.2 / 72)
  figure = Figure(
    figsize=(width * columns, height * lines), dpi=130, layout='constrained'
  )
  figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
  backend_agg.FigureCanvasAgg(figure)
  axes = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
  for ax in axes[count:]:
    ax.set_axis_off()
  return figure, axes[:count]


def save(
  figure: Figure, labels: Mapping[Axes, Sequence[Label]], path: os.PathLike
) -> None:
  """Writes the labels beside their axes, then the file."""
  figure.draw_without_rendering()  # settles the limits that labels need
  for ax in labels:
    _label_right(ax, labels[ax])
  Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path)


def file_name(stem: str, setting: Overrides) -> str:
  """`rms.png`, or `rms-size=0.1B.png` for one setting."""
  if not setting:
    return f'{stem}.png'
  return f'{stem}-{re.sub(r"[^A-Za-z0-9._=+-]+", "_", words(setting))}.png'


def step_axis(ax: Axes) -> None:
  """Where weights start shows in the first steps; a log axis has the room."""
  ax.set_xscale('log')
  ax.xaxis.set_major_formatter('{x:g}')
  ax.margins(x=0)
  ax.set_xlabel('step (optimizer updates)')


def token_axis(ax: Axes) -> None:
  """Tokens seen, log; what was measured before training stands at 0."""
  x = np.concatenate([line.get_xdata() for line in ax.get_lines()[:1]])
  first = min(x[x > 0], default=1.0)
  ax.set_xscale('symlog', linthresh=first, linscale=0.3)
  powers = np.arange(np.ceil(np.log10(first)), np.log10(max(x)) + 1e-9)
  ax.xaxis.set_major_locator(FixedLocator([0, *10.0**powers]))
  ax.margins(x=0)
  ax.set_xlabel('tokens seen')


def _label_right(ax: Axes, labels: Sequence[Label]) -> None:
  """Writes labels beside the axes, moved apart where they would collide."""
  labels = [label for label in labels if np.isfinite(label[0])]
  if not labels:
    return
  labels = sorted(labels, key=lambda item: item[0])
  points = 72 / ax.figure.dpi
  bottom, top = (edge * points for edge in ax.get_window_extent().intervaly)
  x = ax.get_xlim()[1]  # 0 has no place on a log axis
  y = ax.transData.transform([(x, at) for at, _, _ in labels])[:, 1] * points
  # Above the axis if there is room, so that tick labels stay free.
  lift = spread(y) - LINE_POINTS * np.arange(len(y))
  free = max(bottom, top - LINE_POINTS * (len(y) - 1))
  placed = np.clip(lift, bottom, free) + LINE_POINTS * np.arange(len(y))
  for (at, text, colour), shift in zip(labels, placed - y, strict=True):
    ax.annotate(
      text,
      xy=(1, at),
      xycoords=('axes fraction', 'data'),
      xytext=(22, shift),
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

"""Figures of coordinate_check: slopes at step 0, and the first steps.

gamma is a sequential colour (viridis: legible in grey and to colour-blind
readers); numbers stand beside the lines they belong to.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import lines, ticker
from matplotlib.axes import Axes
from matplotlib.backends import backend_agg
from matplotlib.figure import Figure

from gamma_jax import report_style

CHECKED = {
  'attention_flow': 'attention branch / embedding (RMS)',
  'mlp_flow': 'MLP branch / embedding (RMS)',
  'logits_std': 'logits (std)',
}
FOLLOWED = {
  'update_vo': 'RMS(update) / RMS(weights), V and O',
  'attention_flow': 'attention branch / embedding',
  'mlp_flow': 'MLP branch / embedding',
  'logits_std': 'std of the logits',
}
NAMES = {'gelu': 'GELU MLP', 'swiglu': 'SwiGLU MLP'}
INK, GREY = '#222222', '#777777'
GAP = 12.0  # points between two labels

Row = dict[str, Any]
Label = tuple[float, str, Any]  # y in data units, text, colour


def plot_slopes(
  rows: Sequence[Row], slopes: Sequence[Any], path: str | os.PathLike
) -> None:
  """One panel for each quantity and MLP kind: size against width."""
  rows = [row for row in rows if row['step'] == 0]
  mlps = _values(rows, 'mlp')
  colours = _colours(_values(rows, 'gamma'))
  with matplotlib.rc_context(report_style.STYLE):
    size = (5.6 * len(mlps), 8.6)
    figure, axes = _figure(size, len(CHECKED), len(mlps), sharey='row')
    labels = {}
    for i, quantity in enumerate(CHECKED):
      for ax, mlp in zip(axes[i], mlps, strict=True):
        these = [s for s in slopes if (s.quantity, s.mlp) == (quantity, mlp)]
        labels[ax] = _slopes_panel(ax, rows, these, colours)
        ax.set_title(NAMES[mlp] if not i else '', fontweight='bold')
      axes[i][0].set_ylabel(CHECKED[quantity])
    for ax in axes[-1]:
      ax.set_xlabel('width D')
    figure.suptitle(
      r'Sizes at step 0 under $\sigma = d_\mathrm{in}^{-\gamma}$:'
      ' power laws of the width, fitted and as theory has them',
      x=0.01, ha='left', fontsize=12,
    )  # fmt: skip
    figure.legend(
      [
        lines.Line2D([], [], ls='', marker='o', ms=4, color=GREY),
        lines.Line2D([], [], color=GREY, lw=2.6, alpha=0.6),
        lines.Line2D([], [], color=INK, lw=1.0, dashes=(4, 3)),
      ],
      ['one seed', 'fit', 'slope of theory, through the first width'],
      loc='outside lower left', ncols=3, frameon=False,
    )  # fmt: skip
    figure.draw_without_rendering()  # settles the limits that labels need
    for ax, beside in labels.items():
      _label_right(ax, beside, r'  $\gamma$         slope ± 95 %   (theory)')
    figure.savefig(path)


def _slopes_panel(ax: Axes, rows, slopes, colours) -> list[Label]:
  ax.set(xscale='log', yscale='log')
  labels = []
  for s in slopes:
    arm = [r for r in rows if (r['mlp'], r['gamma']) == (s.mlp, s.gamma)]
    x = np.array([row['width'] for row in arm])
    y = np.array([row[s.quantity] for row in arm])
    ends = np.array([x.min(), x.max()])
    colour = colours[s.gamma]
    ax.plot(x, y, 'o', ms=5, mew=0.5, mec='white', color=colour, zorder=4)
    fitted = np.exp(s.intercept) * ends**s.slope
    ax.plot(ends, fitted, color=colour, lw=2.6, alpha=0.6)
    first = np.exp(np.mean(np.log(y[x == ends[0]])))
    told = first * (ends / ends[0]) ** s.expected
    ax.plot(ends, told, color=INK, lw=1.0, dashes=(4, 3), zorder=3)
    text = (
      f'{s.gamma:.2f}   {s.slope:+.2f} ± {s.margin:.2f}   ({s.expected:+.2f})'
    )
    text = text.replace('-', '\N{MINUS SIGN}')
    labels.append((fitted[1], text, colour))
  _width_ticks(ax, sorted({row['width'] for row in rows}))
  _value_ticks(ax)
  return labels


def plot_steps(rows: Sequence[Row], lr: float, path: str | os.PathLike) -> None:
  """The first updates at the largest width, one row an MLP kind."""
  width = max(row['width'] for row in rows)
  rows = [row for row in rows if row['width'] == width]
  mlps = _values(rows, 'mlp')
  colours = _colours(_values(rows, 'gamma'))
  with matplotlib.rc_context(report_style.STYLE):
    size = (3.2 * len(FOLLOWED), 3.0 * len(mlps) + 0.5)
    figure, axes = _figure(size, len(mlps), len(FOLLOWED), sharey='col')
    labels = {}
    for mlp, line in zip(mlps, axes, strict=True):
      for ax, quantity in zip(line, FOLLOWED, strict=True):
        these = [row for row in rows if row['mlp'] == mlp]
        labels[ax] = _steps_panel(ax, these, quantity, colours)
        if quantity.startswith('update_'):
          _mark_overwritten(ax)
      line[0].set_ylabel(NAMES[mlp], fontweight='bold')
    for ax, title in zip(axes[0], FOLLOWED.values(), strict=True):
      ax.set_title(title, fontsize=9)
    for ax in axes[-1]:
      ax.set_xlabel('updates done')
    figure.suptitle(
      f'The first Adam updates at D = {width} (lr {lr:g}, no warm-up)',
      x=0.01, ha='left', fontsize=12,
    )  # fmt: skip
    figure.draw_without_rendering()
    for ax, beside in labels.items():
      _label_right(ax, beside, r'$\gamma$')
    figure.savefig(path)


def _steps_panel(ax: Axes, rows, quantity: str, colours) -> list[Label]:
  ax.set_yscale('log')
  labels = []
  for gamma, colour in colours.items():
    arm = [r for r in rows if r['gamma'] == gamma and quantity in r]
    steps = _values(arm, 'step')
    x = [row['step'] for row in arm]
    y = np.array([row[quantity] for row in arm])
    ax.plot(x, y, 'o', ms=3.5, mew=0, alpha=0.6, color=colour)
    mean = [np.exp(np.log(y[np.equal(x, step)]).mean()) for step in steps]
    ax.plot(steps, mean, color=colour, lw=1.6)
    labels.append((mean[-1], f'{gamma:g}', colour))
  steps = _values(rows, 'step')
  ax.set_xticks(steps)
  ax.set_xlim(-0.2, steps[-1] + 0.2)
  _value_ticks(ax)
  return labels


def _mark_overwritten(ax: Axes) -> None:
  ax.axhline(1, color=INK, lw=1.0, dashes=(4, 3), zorder=1)
  ax.annotate(
    'update = weights',
    xy=(1, 1),
    xycoords=('axes fraction', 'data'),
    xytext=(0, 3),
    textcoords='offset points',
    ha='right',
    color=GREY,
    fontsize=7,
  )


def _figure(size: tuple[float, float], rows: int, columns: int, sharey: str):
  figure = Figure(figsize=size, dpi=130, layout='constrained')
  backend_agg.FigureCanvasAgg(figure)
  return figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey)


def _values(rows: Sequence[Row], key: str) -> list:
  return sorted({row[key] for row in rows})


def _colours(gammas: Sequence[float]) -> dict[float, Any]:
  viridis = matplotlib.colormaps['viridis']
  # The yellow end of viridis is too pale on white.
  shares = np.linspace(0, 0.85, len(gammas))
  return {g: viridis(share) for g, share in zip(gammas, shares, strict=True)}


def _width_ticks(ax: Axes, widths: Sequence[int]) -> None:
  ax.set_xticks(widths, [str(width) for width in widths])
  ax.xaxis.set_minor_locator(ticker.NullLocator())


def _value_ticks(ax: Axes) -> None:
  ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f'{y:g}'))
  ax.yaxis.set_minor_formatter(ticker.NullFormatter())
  ax.grid(axis='y', color='#e6e6e6', lw=0.8)
  ax.set_axisbelow(True)


def _label_right(ax: Axes, labels: Sequence[Label], heading: str) -> None:
  """Writes labels beside the axes, moved apart where they would collide."""
  labels = sorted(labels, key=lambda item: item[0])
  points = 72 / ax.figure.dpi
  y = ax.transData.transform([(1, at) for at, _, _ in labels])[:, 1] * points
  placed = report_style.spread(y, GAP)
  texts = [*labels, (labels[-1][0], heading, None)]
  shifts = [*(placed - y), placed[-1] + GAP - y[-1]]
  for (at, text, colour), shift in zip(texts, shifts, strict=True):
    leader = {'arrowstyle': '-', 'color': colour, 'lw': 1.2, 'patchA': None}
    leader |= {'shrinkA': 2, 'shrinkB': 1, 'relpos': (0, 0.5)}
    ax.annotate(
      text,
      xy=(1, at),
      xycoords=('axes fraction', 'data'),
      xytext=(18, shift),
      textcoords='offset points',
      va='center',
      color=GREY if colour is None else INK,
      fontsize=8,
      annotation_clip=False,
      arrowprops=None if colour is None else leader,
    )

"""Pictures of condensation from checkpoints (condense.py)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from gamma_jax import report_style
from gamma_jax.report_style import Label

# Column of the table, its random value, axis label.
_MEASURES = (
  ('stable_rank', 'stable_rank_random', 'stable rank'),
  ('mean_abs_cosine', 'mean_abs_cosine_random', 'mean |cosine| of neurons'),
)
TITLE_LETTERS = 11  # in an inch of a title
_MATRICES = ('q', 'v', 'o', 'up', 'down', 'embed')


def trajectories(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
  """A column of panels a matrix: mean over layers, a line a cell."""
  kinds = [k for k in _MATRICES if any(r['matrix'] == k for r in rows)]
  cells = list(dict.fromkeys(row['cell'] for row in rows))
  names = dict(zip(cells, short_names(cells), strict=True))
  colours = matplotlib.colormaps['viridis'](np.linspace(0, 0.85, len(cells)))
  with matplotlib.rc_context(report_style.STYLE):
    figure, axes = report_style.panels(
      len(kinds) * len(_MEASURES), labels=len(cells), height=2.6
    )
    panels = [(kind, *m) for m in _MEASURES for kind in kinds]
    labels: dict[Any, list[Label]] = {}
    for ax, (kind, measure, random, unit) in zip(axes, panels, strict=True):
      labels[ax] = []
      for cell, colour in zip(cells, colours, strict=True):
        of = [r for r in rows if (r['cell'], r['matrix']) == (cell, kind)]
        steps = sorted({r['step'] for r in of})
        values = [
          np.mean([r[measure] for r in of if r['step'] == step])
          for step in steps
        ]
        ax.plot(steps, values, marker='o', ms=3, lw=1.3, color=colour)
        if names[cell]:
          labels[ax].append((values[-1], names[cell], colour))
      floor = np.mean([r[random] for r in rows if r['matrix'] == kind])
      ax.axhline(floor, color=report_style.GREY, lw=0.9, ls=':')
      ax.set_title(f'{kind} (dotted: random)')
      ax.set_ylabel(unit)
      ax.set_xlabel('optimizer updates')
    if len(cells) == 1:
      figure.suptitle(cells[0], x=0.01, ha='left', fontsize=10)
    report_style.save(figure, labels, path)


def short_names(cells: Sequence[str]) -> list[str]:
  """What tells cells apart: the parts of their ids that not all have."""
  parts = [cell.split(',') for cell in cells]
  shared = set(parts[0]).intersection(*parts)
  return [','.join(p for p in own if p not in shared) for own in parts]


def cosines(
  cell: str, pictures: Mapping[int, Mapping[str, np.ndarray]], path: Path
) -> None:
  """A row of squares a matrix, a column a checkpoint.

  Args:
    cell: for the title.
    pictures: step -> matrix -> ordered cosines [n, n].
    path: of the file.
  """
  kinds = list(next(iter(pictures.values())))
  with matplotlib.rc_context(report_style.STYLE):
    figure = Figure(
      figsize=(1.9 * len(pictures) + 1.0, 1.8 * len(kinds) + 0.5),
      dpi=130,
      layout='constrained',
    )
    axes = figure.subplots(len(kinds), len(pictures), squeeze=False)
    for column, (step, by_kind) in enumerate(pictures.items()):
      for row, kind in enumerate(kinds):
        ax = axes[row, column]
        image = ax.imshow(
          by_kind[kind],
          cmap='RdBu_r',
          vmin=-1,
          vmax=1,
          interpolation='nearest',
        )
        ax.set_xticks([])
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
        if row == 0:
          ax.set_title(f'update {step}')
        if column == 0:
          ax.set_ylabel(f'{kind}: {len(by_kind[kind])} neurons')
    figure.get_layout_engine().set(rect=(0.05, 0, 0.94, 1))
    figure.colorbar(image, ax=axes, shrink=0.6, label='cosine')
    title = f'{cell}, middle layer'.replace(',', ', ').replace(',  ', ', ')
    letters = int(TITLE_LETTERS * figure.get_figwidth())
    title = textwrap.fill(title, letters)
    figure.suptitle(title, x=0.01, ha='left', fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)

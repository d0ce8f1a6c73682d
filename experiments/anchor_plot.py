"""What a sweep of configs/anchor.py says of the mirror pair, by gamma.

  python -m experiments.anchor_plot runs/anchor

Prints a table (mean over seeds, and each seed's composed share) and writes
report/anchor.md and report/anchor.png into the folder of the sweep.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends import backend_agg
from matplotlib.figure import Figure

from gamma_jax import errors, files, findings, report_style, results

# Blue, vermilion and grey: apart for colour-blind readers, too.
SHARES = {
  'compositional': '#0072b2',
  'symmetric': '#d55e00',
  'other': report_style.GREY,
}
NEAR_ONE = 0.95  # accuracy on trained pairs below which dots are hollow


def table(arms: Sequence[results.Arm]) -> str:
  """Markdown: one line an arm."""
  lines = [
    '| arm | seen pairs | forced pair | composed | symmetric | other | composed'
    ', each seed | seeds |',
    '| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |',
  ]
  for arm in arms:
    means = [
      f'{np.mean(values(arm, name)):.3f}'
      for name in (
        'heldout/accuracy',
        'heldout/accuracy/forced',
        *(f'heldout/mirror/{share}' for share in SHARES),
      )
    ]
    each = [f'{v:.2f}' for v in values(arm, 'heldout/mirror/compositional')]
    cells = [arm.label, *means, ' '.join(each), f'{len(each)}']
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines) + '\n'


def values(arm: results.Arm, name: str) -> list[float]:
  """One metric of the finished cells of an arm."""
  found = [row.numbers.get(name, math.nan) for row in arm.rows]
  return [value for value in found if math.isfinite(value)]


def settings(arms: Sequence[results.Arm]) -> dict[str, list[results.Arm]]:
  """Arms that differ in gamma alone, by what they share, gamma growing."""
  rest = [
    {k: v for k, v in arm.overrides.items() if k != findings.GAMMA}
    for arm in arms
  ]
  keys = results.varying(rest)
  found: dict[str, list[results.Arm]] = {}
  for arm, shared in zip(arms, rest, strict=True):
    found.setdefault(results.label(shared, keys), []).append(arm)
  for group in found.values():
    group.sort(key=lambda arm: arm.overrides[findings.GAMMA])
  return found


def plot(groups: dict[str, list[results.Arm]], path: Path) -> None:
  """A panel a setting: shares against gamma, a dot a seed, a line of means."""
  columns = min(3, len(groups))
  rows = -(-len(groups) // columns)
  with matplotlib.rc_context(report_style.STYLE):
    size = (max(5.0, 3.6 * columns), 0.6 + 2.8 * rows)  # the legend is wide
    figure = Figure(size, layout='constrained', dpi=150)
    backend_agg.FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flat
    for number, (title, arms) in enumerate(groups.items()):
      _panel(panels[number], arms)
      title = title if len(groups) > 1 else ''
      panels[number].set(title=title, xlabel=r'$\gamma$', ylim=(-0.03, 1.03))
    for ax in panels[len(groups) :]:
      ax.remove()
    figure.legend(
      *panels[0].get_legend_handles_labels(),
      loc='outside upper center', ncols=4, frameon=False,
    )  # fmt: skip
    figure.supylabel('share of answers, unseen pair', fontsize=9)
    figure.savefig(path)


def _panel(ax: Axes, arms: Sequence[results.Arm]) -> None:
  gammas = [arm.overrides[findings.GAMMA] for arm in arms]
  for share, colour in SHARES.items():
    for gamma, arm in zip(gammas, arms, strict=True):
      learned = np.mean(values(arm, 'heldout/accuracy')) >= NEAR_ONE
      points = values(arm, f'heldout/mirror/{share}')
      face = colour if learned else 'white'
      ax.plot([gamma] * len(points), points, 'o', ms=4, mfc=face, mec=colour)
    means = [np.mean(values(arm, f'heldout/mirror/{share}')) for arm in arms]
    ax.plot(gammas, means, color=colour, lw=1.5, label=share)
  accuracy = [np.mean(values(arm, 'heldout/accuracy')) for arm in arms]
  ax.plot(gammas, accuracy, color='#222222', lw=1, ls=':', label='seen pairs')
  ax.set_xticks(gammas)


def main(argv: Sequence[str]) -> int:
  """Returns the exit code."""
  if len(argv) != 2:
    print(__doc__, file=sys.stderr)
    return errors.ConfigError.exit_code
  workdir = Path(argv[1])
  try:
    rows = results.collect(workdir)
  except errors.ConfigError as error:
    print(error, file=sys.stderr)
    return error.exit_code
  arms = [
    arm
    for arm in results.summarize(rows)
    if findings.GAMMA in arm.overrides
    and values(arm, 'heldout/mirror/compositional')
  ]
  if not arms:
    print(f'no finished anchor cell in {workdir}', file=sys.stderr)
    return errors.ConfigError.exit_code
  text = table(arms)
  print(text, end='')
  files.write_text(workdir / 'report' / 'anchor.md', text)
  plot(settings(arms), workdir / 'report' / 'anchor.png')
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))

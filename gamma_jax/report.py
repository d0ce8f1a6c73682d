"""What a sweep found: results.csv, a table with intervals and a plot."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import rich.console
import rich.table

from gamma_jax import files, results

BYTE = 'heldout/bits_per_byte'
EDGES = ('init.gamma', 'opt.lr')  # keys whose best value should lie inside


def write_report(
  workdir: str | os.PathLike, console: rich.console.Console | None = None
) -> list[results.Row]:
  """Everything: results.csv, printed table, report/table.md, report/loss.png.

  Without matplotlib, or a finished cell, there is no plot. Returns the rows.
  """
  workdir = Path(workdir)
  console = console or rich.console.Console()
  rows = results.collect(workdir)
  results.write_results_csv(rows, workdir / 'results.csv')
  arms = results.summarize(rows)
  print_table(arms, console)
  files.write_text(workdir / 'report' / 'table.md', markdown(arms))
  if not any(arm.values for arm in arms):
    return rows
  try:
    from gamma_jax import report_plot  # late: matplotlib is an extra
  except ImportError:
    # A long sweep must not end in an error for want of a picture.
    console.print('No plot: pip install gamma_jax[report]', markup=False)
    return rows
  report_plot.plot(arms, workdir / 'report' / 'loss.png')
  return rows


def print_table(
  arms: Sequence[results.Arm], console: rich.console.Console | None = None
) -> None:
  """The table on the terminal, with its notes."""
  header, body = _cells(arms)
  table = rich.table.Table()
  for number, name in enumerate(header):
    table.add_column(
      name, justify='right' if number else 'left', no_wrap=number > 0
    )
  for line in body:
    table.add_row(*line)
  console = console or rich.console.Console()
  console.print(table)
  for note in notes(arms):
    console.print(note, highlight=False, markup=False)


def markdown(arms: Sequence[results.Arm]) -> str:
  """The same table and notes."""
  header, body = _cells(arms)
  lines = [header, ['---', *['---:'] * (len(header) - 1)], *body]
  text = ''.join('| ' + ' | '.join(line) + ' |\n' for line in lines)
  return text + ''.join(f'\n{note}\n' for note in notes(arms))


def notes(arms: Sequence[results.Arm]) -> list[str]:
  """What a reader must know to read the table right."""
  lines = [
    'Held-out loss in nats per token: mean over seeds ± half-width of its '
    f'95 % t interval. Difference: to {arms[0].label}, paired by seed.'
  ]
  if any('*' in cell for line in _cells(arms)[1] for cell in line[1:]):
    lines.append(
      f'* fewer than {results.INDICATIVE} seeds: the interval is wide, and '
      'indicative only.'
    )
  unfinished = [
    f'{row.id} ({row.status})'
    for arm in arms
    for row in arm.rows
    if row.status != 'done'
  ]
  if unfinished:
    lines.append('Not finished: ' + '; '.join(unfinished) + '.')
  return lines + _edge_notes(arms)


def _edge_notes(arms: Sequence[results.Arm]) -> list[str]:
  """Warns when the best value of a key may lie outside of the grid."""
  lines = []
  for key in EDGES:
    found = [
      arm
      for arm in arms
      if key in arm.overrides and math.isfinite(arm.loss.mean)
    ]
    values = sorted({arm.overrides[key] for arm in found})
    if len(values) < 3:
      continue
    best = min(found, key=lambda arm: arm.loss.mean).overrides[key]
    if best in (values[0], values[-1]):
      lines.append(
        f'Lowest loss at {key}={best}, an edge of the grid: the best value may '
        'lie outside.'
      )
  return lines


def _cells(arms: Sequence[results.Arm]) -> tuple[list[str], list[list[str]]]:
  header = ['arm', 'held-out loss', 'difference', 'bits per byte', 'seeds']
  body = []
  for number, arm in enumerate(arms):
    per_byte = results.interval(
      [float(row.numbers[BYTE]) for row in arm.rows if BYTE in row.numbers]
    )
    difference = show(arm.difference, '+') if number else ''
    if number and arm.difference.n < arm.loss.n:
      difference += f' ({arm.difference.n} pairs)'
    seeds = f'{arm.loss.n}'
    if arm.loss.n < len(arm.rows):
      seeds += f' of {len(arm.rows)}'
    byte = f'{per_byte.mean:.4f}' if per_byte.n else ''
    body.append([arm.label, show(arm.loss), difference, byte, seeds])
  return header, body


def show(value: results.Interval, sign: str = '') -> str:
  """`3.1416 ± 0.0021`, a star where the interval is indicative only."""
  if not value.n:
    return 'none'
  text = f'{value.mean:{sign}.4f}'
  if value.n < 2:
    return text
  star = '*' if value.n < results.INDICATIVE else ''
  return f'{text} ± {value.half:.4f}{star}'

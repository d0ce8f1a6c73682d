"""What a sweep found: results.csv, a table, a page with plots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import rich.console
import rich.table

from gamma_jax import files, findings, report_html, report_tables, results


def write_report(
  workdir: str | os.PathLike, console: rich.console.Console | None = None
) -> list[results.Row]:
  """results.csv, a printed table, and report/: index.html, table.md, PNGs.

  Without matplotlib, or a finished cell, there are no plots. Returns the rows.
  """
  workdir = Path(workdir)
  console = console or rich.console.Console()
  rows = results.collect(workdir)
  results.write_results_csv(rows, workdir / 'results.csv')
  found = findings.find(rows)
  print_table(found, console)
  folder = workdir / 'report'
  files.write_text(folder / 'table.md', markdown(found))
  pictures: Sequence[report_html.Picture] = []
  try:
    from gamma_jax import report_plot  # late: matplotlib is an extra
  except ImportError:
    # A long sweep must not end in an error for want of a picture.
    console.print('No plot: pip install gamma_jax[report]', markup=False)
  else:
    pictures = report_plot.draw(found, folder)
  page = report_html.page(found, workdir, pictures)
  files.write_text(folder / 'index.html', page)
  console.print(
    f'Report: {folder / "index.html"}', markup=False, soft_wrap=True
  )
  return rows


def print_table(
  found: findings.Findings, console: rich.console.Console | None = None
) -> None:
  """The table of arms on the terminal, with its notes."""
  content = report_tables.arms(found)
  table = rich.table.Table()
  for number, name in enumerate(content.header):
    table.add_column(
      name, justify='right' if number else 'left', no_wrap=number > 0
    )
  for line in content.body:
    table.add_row(*line)
  console = console or rich.console.Console()
  console.print(table)
  for note in report_tables.notes(found):
    console.print(note, highlight=False, markup=False)


def markdown(found: findings.Findings) -> str:
  """The tables and notes of the page, for a text file."""
  parts = [as_markdown(report_tables.arms(found))]
  if found.compared:
    parts.append(as_markdown(report_tables.compared(found)))
  if found.sized:
    parts.append(as_markdown(report_tables.sized(found)))
  notes = report_tables.notes(found)
  if found.sized:
    notes += report_tables.size_notes(found)
  return '\n'.join(parts) + ''.join(f'\n{note}\n' for note in notes)


def as_markdown(table: report_tables.Table) -> str:
  """The table in Markdown, numbers to the right."""
  rule = [
    '---' if i in table.words else '---:' for i in range(len(table.header))
  ]
  lines = [table.header, rule, *table.body]
  return ''.join('| ' + ' | '.join(line) + ' |\n' for line in lines)

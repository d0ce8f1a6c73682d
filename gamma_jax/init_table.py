"""The init report as text."""

from __future__ import annotations

import io

import rich.console
import rich.table

from gamma_jax import init_report


def print_report(
  report: init_report.InitReport, console: rich.console.Console | None = None
) -> None:
  """Prints matrices, norms and branches, logits, and the warnings."""
  console = console or rich.console.Console()
  console.print(_matrices(report))
  console.print(_flow(report))
  for line in summary(report):
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def as_text(report: init_report.InitReport) -> str:
  """The same as plain text, 140 columns wide."""
  console = rich.console.Console(width=140, record=True, file=io.StringIO())
  print_report(report, console)
  return console.export_text()


def summary(report: init_report.InitReport) -> list[str]:
  """The numbers that fit a line each, then the warnings."""
  lines = [
    f'Init ({report.source}): rule {report.rule}, logits std '
    f'{report.logits_std:.4f}, loss {report.loss:.4f} against ln V = '
    f'{report.ln_vocab:.4f}',
    f'Adam: {report.adam_drowned_share:.1%} of matrix entries have a first '
    f'gradient within {init_report.ADAM_MARGIN:g}x of eps {report.adam_eps:g}',
  ]
  return lines + [f'warning: {w}' for w in report.warnings]


def _matrices(report: init_report.InitReport) -> rich.table.Table:
  table = rich.table.Table(title=f'Matrices at step 0 ({report.source})')
  for name in (
    'parameter',
    'role',
    'shape',
    'd_in',
    'std asked',
    'std got',
    'z',
    'gamma',
    'grad rms',
  ):
    left = name == 'parameter'
    # Folded rather than cut: a narrow terminal must not hide digits.
    justify = 'left' if left else 'right'
    table.add_column(name, justify=justify, no_wrap=left, overflow='fold')
  for m in report.matrices:
    table.add_row(
      m.path,
      m.role,
      'x'.join(map(str, m.shape)),
      str(m.d_in),
      f'{m.std_asked:.3e}' if m.role != 'norm' else 'ones',
      '-' if m.std_got is None or m.role == 'norm' else f'{m.std_got:.3e}',
      '-' if m.z is None else f'{m.z:+.1f}',
      '-' if m.gamma is None else f'{m.gamma:.3f}',
      '-' if m.role == 'norm' else f'{m.grad_rms:.1e}',
    )
  return table


def _flow(report: init_report.InitReport) -> rich.table.Table:
  """One row a layer: what each norm keeps and how large each branch is."""
  table = rich.table.Table(
    title=f'Residual flow at step 0 ({report.source}, eps {report.norm_eps:g})'
  )
  for name in (
    'where',
    'stream variance',
    'norm keeps',
    'RMS(branch)/RMS(stream)',
  ):
    table.add_column(name, justify='left' if name == 'where' else 'right')
  ratios = {b.name: b.ratio for b in report.branches}
  for norm in report.norms:
    name = norm.name.removesuffix(' norm')
    ratio = ratios.get(name)
    table.add_row(
      name,
      f'{norm.mean_square:.2e}',
      f'{norm.kept:.1%}',
      '-' if ratio is None else f'{ratio:.3g}',
    )
  return table

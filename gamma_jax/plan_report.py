"""What --mode=plan prints: what a grid will take and what it starts from.

Parameters, FLOPs, tokens and memory by arithmetic; the init report of every
arm, drawn where that is quick, else predicted. With plan.target instead the
real train step, compiled for those chips. What it cannot tell: speed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import rich.console
import rich.table

from gamma_jax import (
  ahead_of_time,
  chips,
  configure,
  files,
  flops,
  heldout,
  init_report,
  init_table,
  plan,
  sharding,
  streams,
)
from gamma_jax import program as program_lib
from gamma_jax.config import Config
from gamma_jax.errors import ConfigError

# A CPU draws and measures an init in this many FLOPs of a batch, or predicts
# it: some twenty seconds on two cores.
QUICK = 1e12
TRIES = 8  # compiles of one search for the largest batch
UNEVEN = 1.1  # a chip with more than this of its share of the state is told of
WIDTH = 140  # columns where there is no terminal


def print_plan(
  cells: Sequence,
  workdir: Path | None = None,
  console: rich.console.Console | None = None,
) -> dict[str, Any]:
  """Prints the plan of a grid, and keeps it as plan.txt and plan.json.

  Args:
    cells: sweep.Cell objects (id and config).
    workdir: where to keep it; None does not.
    console: None takes standard output.

  Returns:
    The content of plan.json.

  Raises:
    ConfigError: after all is printed: a shape does not fit plan.target.
  """
  console = console or rich.console.Console()
  if not console.is_terminal:
    console.width = WIDTH
  console.record = True
  asked = cells[0].config.plan
  if asked.target:
    target = chips.parse(asked.target)
    where = ahead_of_time.devices(target)
    out = {'cells': _grid(cells, len(where), console)}
    shapes = [_compiled(c, target, where) for c in _by_shape(cells).values()]
    _print_target(shapes, target, asked.mfu, len(where), console)
    out |= {'target': asked.target, 'mfu': asked.mfu, 'shapes': shapes}
  else:
    out = {'cells': _grid(cells, jax.device_count(), console)}
    out |= {'shapes': [], 'init': _init_reports(cells, console)}
  if workdir:
    files.write_text(workdir / 'plan.txt', console.export_text())
    files.write_json(workdir / 'plan.json', out)
  refused = [shape['shape'] for shape in out['shapes'] if not shape['fits']]
  if refused:
    raise ConfigError(
      f'{", ".join(refused)} does not fit {asked.target}: take more chips, a '
      'smaller train.batch_size, train.accumulation=N or mesh.fsdp=-1'
    )
  return out


def _by_shape(cells: Sequence) -> dict[Config, list]:
  """Cells that share a compiled program, in order."""
  groups: dict[Config, list] = {}
  for cell in cells:
    groups.setdefault(configure.program_key(cell.config), []).append(cell)
  return groups


def _work(config: Config) -> dict[str, float]:
  count = flops.parameters(config.model)
  train = config.train
  tokens = train.steps * train.batch_size * train.seq_len
  return {
    'params': count.total,
    'non_embedding': count.non_embedding,
    'tokens': tokens,
    'flops': tokens * flops.flops_per_token(config.model, train.seq_len),
  }


def _grid(
  cells: Sequence, devices: int, console: rich.console.Console
) -> list[dict[str, Any]]:
  """Prints size, tokens, FLOPs and estimated memory of every cell."""
  table = rich.table.Table(title=f'{len(cells)} cells on {devices} devices')
  for name in ('cell', 'params', 'non-emb', 'tokens', 'FLOPs', 'GiB/device'):
    left = name == 'cell'
    table.add_column(name, justify='left' if left else 'right', overflow='fold')
  rows = []
  for cell in cells:
    need = sum(plan.bytes_per_device(cell.config, devices).values())
    row = {'cell': cell.id, **_work(cell.config), 'bytes_per_device': need}
    rows.append(row)
    table.add_row(
      cell.id,
      f'{row["params"] / 1e6:,.1f}M',
      f'{row["non_embedding"] / 1e6:,.1f}M',
      f'{row["tokens"] / 1e6:,.1f}M',
      f'{row["flops"]:.2e}',
      f'{need / plan.GIB:,.2f}',
    )
  console.print(table)
  total = sum(row['flops'] for row in rows)
  _say(console, f'{total:.3e} FLOPs in all; GiB/device is an estimate')
  return rows


def _compiled(cells: list, target: chips.Target, where) -> dict[str, Any]:
  """The row of one shape: its compiled step, time, and its largest batch."""
  config, limit = cells[0].config, plan.USABLE * target.chip.memory * plan.GIB
  label = config.size or cells[0].id

  def step(config: Config) -> ahead_of_time.Step:
    made = ahead_of_time.compile_step(config, where)
    size = made.refusal or f'{made.peak / plan.GIB:.2f} GiB'
    logging.info('%s, %d rows a chip: %s', label, made.rows, size)
    return made

  def fits(made: ahead_of_time.Step) -> bool:
    return made.peak is not None and made.peak <= limit

  logging.info('compiling %s for %s, some 10 to 60 s', label, target.name)
  own = step(config)
  found: tuple[int | None, int | None] = (None, None)
  if config.plan.largest_batch:
    seen = {own.rows: fits(own)}

    def fits_rows(n: int) -> bool:
      if n not in seen:
        seen[n] = fits(step(ahead_of_time.with_rows(config, where, n)))
      return seen[n]

    found = ahead_of_time.largest(fits_rows, own.rows, TRIES)
  held, share = ahead_of_time.state_bytes(config, where)
  seconds = _work(config)['flops'] / (config.plan.mfu * target.chip.peak)
  return {
    'shape': label,
    'cells': len(cells),
    'rows': own.rows,
    'state_bytes': held,
    'even_state_bytes': share,
    'peak_bytes': own.peak,
    'fits': fits(own),
    'refusal': own.refusal,
    'largest_rows': found[0],
    'smallest_refused_rows': found[1],
    'device_hours_a_cell': seconds / 3600,
  }


def _print_target(
  shapes: list[dict[str, Any]],
  target: chips.Target,
  mfu: float,
  count: int,
  console: rich.console.Console,
) -> None:
  table = rich.table.Table(
    title=f'{target.name}: {count} chips of {target.chip.memory} GiB, train '
    'step compiled'
  )
  names = ('shape', 'cells', 'rows/chip', 'state GiB', 'peak GiB', 'of memory')
  for name in (*names, 'largest', 'device-hours'):
    table.add_column(name, justify='left' if name == 'shape' else 'right')
  notes = []
  for s in shapes:
    peak = s['peak_bytes']
    table.add_row(
      s['shape'],
      str(s['cells']),
      str(s['rows']),
      f'{s["state_bytes"] / plan.GIB:.2f}',
      'refused' if peak is None else f'{peak / plan.GIB:.2f}',
      '-' if peak is None else f'{peak / plan.GIB / target.chip.memory:.0%}',
      '-' if s['largest_rows'] is None else str(s['largest_rows']),
      f'{s["cells"] * s["device_hours_a_cell"]:,.0f}',
    )
    if s['refusal']:
      notes.append(f'{s["shape"]} does not fit: {s["refusal"]}')
    elif not s['fits']:
      share = f'{plan.USABLE:.0%} of the memory of a chip'
      notes.append(f'{s["shape"]} does not fit: it passes {share}')
    if s['state_bytes'] > UNEVEN * s['even_state_bytes']:
      notes.append(
        f'{s["shape"]}: a chip holds '
        f'{s["state_bytes"] / s["even_state_bytes"]:.1f} times its share of '
        'weights and moments; mesh.fsdp=-1 shards them over all'
      )
  console.print(table)
  hours = sum(s['cells'] * s['device_hours_a_cell'] for s in shapes)
  _say(
    console,
    f'{hours:,.0f} device-hours in all if {mfu:.0%} of '
    f'{target.chip.peak / 1e12:,.0f} TFLOP/s a chip is reached: an assumption '
    '(plan.mfu), not a forecast',
  )
  for note in notes:
    _say(console, note)


def _init_reports(
  cells: Sequence, console: rich.console.Console
) -> list[dict[str, Any]]:
  """Prints the init of each arm: a whole report a shape, then the warnings."""
  arms: dict[tuple, list] = {}
  for cell in cells:
    c = cell.config
    arms.setdefault((c.model, c.init, c.opt.eps, c.train), []).append(cell)
  out, shown = [], set()
  for group in arms.values():
    config, ids = group[0].config, [cell.id for cell in group]
    report, reason = _init_of(config)
    more = f' and {len(ids) - 1} more' if len(ids) > 1 else ''
    console.rule(f'{ids[0]}{more}: {report.source}')
    key = configure.program_key(config)
    if reason and key not in shown:
      _say(console, f'predicted, not drawn: {reason}')
    if key in shown:
      for line in init_table.summary(report):
        _say(console, line)
    else:
      shown.add(key)
      init_table.print_report(report, console)
    out.append({'cells': ids, 'reason': reason, 'report': report.to_dict()})
  return out


def _init_of(config: Config) -> tuple[init_report.InitReport, str]:
  """Measured where it fits and is quick; else predicted, and why."""
  train = config.train
  tokens = train.batch_size * train.seq_len
  work = tokens * flops.flops_per_token(config.model, train.seq_len)
  if jax.default_backend() == 'cpu' and work > QUICK:
    return init_report.predicted(config), 'a batch is too much for a CPU'
  try:
    where = sharding.devices_for(config.mesh)
    configure.check_devices(config, len(where), where[0].platform)
    plan.check_fits(config)
    heldout.check_vocabulary(config)
    (batch,) = next(streams.Streams([config]))
  except ConfigError as error:
    return init_report.predicted(config), str(error)
  program = program_lib.build(configure.program_key(config), where)
  params = program.init(config).params
  return init_report.measured(config, program, params, batch), ''


def _say(console: rich.console.Console, line: str) -> None:
  console.print(line, highlight=False, markup=False, soft_wrap=True)

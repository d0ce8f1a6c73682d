"""A grid of cells: their ids, their configs, and running them one by one.

A config module lists its grid in `sweep(add)`, one call of `add` a cell:

  def sweep(add):
    for gamma in (0.5, 1.0):
      for seed in range(3):
        add({'init.gamma': gamma}, seed=seed)

Each dict is one thing that varies. It names the cell by its first entry; the
other entries go along: `add({'init.rule': 'fixed', 'init.std': 0.02})`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gamma_jax import cell_folder, claims, configure, files
from gamma_jax.cell_folder import check_folder, is_done
from gamma_jax.config import Config
from gamma_jax.errors import ConfigError, Preempted

SOME_FAILED = 4  # exit code
POLL = 5.0  # seconds between looks at the cells of other workers
LONGEST_ID = 200  # file systems allow 255 bytes; temporary files need a few
# One process has one platform and one way to run its grid.
_OF_THE_GRID = ('platform', 'sweep.', 'plan.')


class Groups(Protocol):
  """Decides which cells train together, and trains them."""

  def split(
    self, cells: Sequence[Cell], todo: Sequence[Cell]
  ) -> list[list[Cell]]:
    """The cells to run, in order, in groups."""

  def train(self, group: Sequence[Cell]) -> list[Exception | None]:
    """Trains a group of several; for every cell None or why it failed."""


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run of the grid.

  Attributes:
    id: stable and readable; also the name of its folder.
    config: validated.
    overrides: path -> value of what names the cell.
  """

  id: str
  config: Config
  overrides: Mapping[str, Any]


def expand(
  base: Config,
  sweep_fn: Callable[[Callable[..., None]], None] | None = None,
  fixed: Collection[str] = (),
) -> list[Cell]:
  """Lists the cells of a grid; needs no device.

  Args:
    base: what the cells start from.
    sweep_fn: calls add(*bundles, **overrides) once a cell, see above; None
      gives the single cell `run`.
    fixed: paths that the command line sets, which no cell may set again.

  Raises:
    ConfigError: names the cell: unknown key, wrong type, value out of range,
      a key given twice or fixed, an id that is taken or too long.
  """
  if sweep_fn is None:
    return [Cell('run', configure.validate(base), {})]
  cells: dict[str, Cell] = {}

  def add(*bundles: Mapping[str, Any], **overrides: Any) -> None:
    cell = _cell(
      base, (*bundles, *({k: v} for k, v in overrides.items())), fixed
    )
    if cell.id in cells:
      raise ConfigError(f'cell {cell.id}: added twice; ids must differ')
    cells[cell.id] = cell

  sweep_fn(add)
  if not cells:
    raise ConfigError('the sweep of the config adds no cell')
  return list(cells.values())


def select(cells: Sequence[Cell], only: str = '') -> list[Cell]:
  """The cell whose id is `only`, else all whose id contains it.

  Raises:
    ConfigError: there are none.
  """
  same = [cell for cell in cells if only == cell.id]  # seed=1, not seed=10
  selected = same or [cell for cell in cells if only in cell.id]
  if not selected:
    known = '; '.join(cell.id for cell in cells[:3])
    more = f' and {len(cells) - 3} more' if len(cells) > 3 else ''
    raise ConfigError(f'no cell id contains {only!r}; there are {known}{more}')
  return selected


def run_sweep(
  cells: Sequence[Cell],
  workdir: str | os.PathLike,
  train_fn: Callable[[Config, Path], Any],
  only: str = '',
  together: Groups | None = None,
  idle: Callable[[float], None] = time.sleep,
) -> int:
  """Runs what is not done yet; a failure stays with its cell.

  Any number of workers may call this on one workdir, from any host: each cell
  runs in one of them, and all return when all cells are done or have failed.

  Args:
    cells: the whole grid.
    workdir: gets sweep.json and one folder a cell.
    train_fn: (config, folder of the cell) -> anything; it leaves results.json
      with status done.
    only: runs the cells whose id contains this.
    together: decides which cells train in one program; None: each alone.
    idle: called with seconds while other workers have the cells that are left.

  Returns:
    Exit code: 0 all done; 2 nothing but bad input; 3 preempted; 4 some cells
    failed.

  Raises:
    ConfigError: before any cell runs: a folder belongs to another config.
  """
  workdir = Path(workdir)
  selected = select(cells, only)
  for cell in cells:
    check_folder(cell, workdir)
  try:
    files.write_json(workdir / 'sweep.json', cell_folder.index(cells, workdir))
  except OSError as error:
    raise ConfigError(f'cannot write to --workdir: {error}') from error
  worker = _Worker(cells, selected, workdir, train_fn, together)
  while not worker.finished():
    worker.next(idle)
  return worker.exit_code()


class _Worker:
  """Runs what no other worker has claimed, until all is done or has failed."""

  def __init__(self, cells, selected, workdir, train_fn, together):
    self._cells, self._selected = cells, selected
    self._workdir, self._train_fn, self._together = workdir, train_fn, together
    self._claims = claims.Claims(workdir / 'claims')
    self._tried: set[str] = set()
    self._failures: list[Exception] = []
    self._failed_elsewhere = False
    self._preempted: Preempted | None = None
    self._waiting = False
    self._todo = self._left()
    self._total = len(self._todo)
    if self._total < len(selected):
      done = len(selected) - self._total
      logging.info('%d of %d cells are done already', done, len(selected))

  def finished(self) -> bool:
    """Whether there is nothing more to run or wait for."""
    fail_fast = self._selected[0].config.sweep.fail_fast
    failed = self._failures or self._failed_elsewhere
    return bool(self._preempted or not self._todo or (failed and fail_fast))

  def next(self, idle: Callable[[float], None]) -> None:
    """Runs the first group that is free; waits a little if none is."""
    for group in self._groups():
      with self._claims.holding([cell.id for cell in group]) as outcomes:
        if outcomes is None:
          continue
        # Another worker may have ended one since it was listed.
        if all(cell not in self._todo or self._is_left(cell) for cell in group):
          self._run(group, outcomes)
        break
    else:
      if not self._waiting:
        logging.info('waiting for %d cells of other workers', len(self._todo))
      self._waiting = True
      idle(POLL)
    self._todo = self._left()

  def exit_code(self) -> int:
    """As run_sweep returns it."""
    if self._preempted:
      return self._preempted.exit_code
    if not self._failures and not self._failed_elsewhere:
      return 0
    bad_input = all(isinstance(e, ConfigError) for e in self._failures)
    if len(self._failures) == self._total and bad_input:
      return ConfigError.exit_code
    return SOME_FAILED

  def _groups(self) -> list[list[Cell]]:
    if self._together:
      return self._together.split(self._cells, self._todo)
    return [[cell] for cell in self._todo]

  def _left(self) -> list[Cell]:
    return [cell for cell in self._selected if self._is_left(cell)]

  def _is_left(self, cell: Cell) -> bool:
    if cell.id in self._tried or is_done(self._workdir / cell.id):
      return False
    if self._claims.failed(cell.id):
      self._failed_elsewhere = True
      return False
    return True

  def _run(self, group: list[Cell], outcomes: claims.Outcomes) -> None:
    self._waiting = False
    ours = [cell for cell in group if cell in self._todo]
    number = self._total - len(self._todo) + len(ours)
    name = group[0].id if len(group) == 1 else f'{len(group)} cells together'
    logging.info('cell %d of %d: %s', number, self._total, name)
    try:
      errors = _run_group(group, self._workdir, self._train_fn, self._together)
    except Preempted as stop:
      logging.warning('%s: %s', name, stop)
      self._preempted = stop
      return
    for cell, error in zip(group, errors, strict=True):
      self._tried.add(cell.id)
      outcomes[cell.id] = 'done' if error is None else 'failed'
      if error is not None:
        cell_folder.report_failure(cell.id, self._workdir / cell.id, error)
        # Without its frames, which hold the arrays of the failed cell.
        self._failures.append(error.with_traceback(None))


def _cell(
  base: Config, bundles: Sequence[Mapping[str, Any]], fixed: Collection[str]
) -> Cell:
  for bundle in bundles:
    if not isinstance(bundle, Mapping) or not bundle:
      raise ConfigError(f'add() takes dicts and keywords, got {bundle!r}')
  named = dict(next(iter(bundle.items())) for bundle in bundles)
  cell_id = ','.join(f'{short_name(k)}={_text(v)}' for k, v in named.items())
  try:
    if not named:
      raise ConfigError('add() needs something that varies')
    config, seen = base, set()
    for path, value in (item for b in bundles for item in b.items()):
      if path in seen:
        raise ConfigError(f'{path} is given twice')
      if path in fixed:
        raise ConfigError(f'sets {path} itself; drop --config.{path}')
      if path.startswith(_OF_THE_GRID):
        raise ConfigError(f'{path} is one for the whole grid')
      seen.add(path)
      config = configure.replace_by_path(config, path, value)
    configure.validate(config)
    if len(cell_id) > LONGEST_ID:
      raise ConfigError('the id is too long; put what goes along in one dict')
  except ConfigError as error:
    raise ConfigError(f'cell {cell_id or "?"}: {error}') from error
  # As resolved: an int given for a float is the same cell.
  overrides = {path: configure.get_by_path(config, path) for path in named}
  cell_id = ','.join(
    f'{short_name(path)}={_text(value)}' for path, value in overrides.items()
  )
  return Cell(cell_id, config, _jsonable(overrides))


def short_name(path: str) -> str:
  """Last word of a path where no other path ends so; gamma_head for roles."""
  role = path.removeprefix('init.overrides.')
  if role != path:
    return f'gamma_{role}'
  leaf = path.rpartition('.')[2]
  known = [*configure.fields(), *configure.groups()]
  same = [
    p
    for p in known
    if p.rpartition('.')[2] == leaf and not p.startswith('init.overrides.')
  ]
  return leaf if len(same) < 2 else path


def _text(value: Any) -> str:
  """A value as part of a file name."""
  if isinstance(value, (list, tuple)):
    value = '+'.join(map(_text, value))
  text = value if isinstance(value, str) else repr(value)
  return re.sub(r'[^A-Za-z0-9._+-]+', '-', text)


def _jsonable(overrides: Mapping[str, Any]) -> dict[str, Any]:
  return {
    path: [list(pair) for pair in value] if isinstance(value, tuple) else value
    for path, value in overrides.items()
  }


def _run_group(
  group: Sequence[Cell], workdir: Path, train_fn, together: Groups | None
) -> list[Exception | None]:
  """For every cell None, or why it failed. Lets Preempted through."""
  for cell in group:
    # First of all, so that a folder with anything in it says whose it is.
    path = workdir / cell.id / 'config.json'
    files.write_json(path, configure.to_dict(cell.config))
  errors: list[Exception | None]
  try:
    if len(group) > 1:
      errors = together.train(group)
    else:
      train_fn(group[0].config, workdir / group[0].id)
      errors = [None]
  except Preempted:
    raise
  except Exception as error:  # whatever it is, the other cells can go on
    errors = [error] * len(group)
  for cell, error in zip(group, errors, strict=True):
    if error is None:
      (workdir / cell.id / 'error.txt').unlink(missing_ok=True)
  return errors

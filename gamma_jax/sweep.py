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

import contextlib
import dataclasses
import logging
import os
import re
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gamma_jax import configure, files
from gamma_jax.config import Config
from gamma_jax.errors import ConfigError, Preempted

SOME_FAILED = 4  # exit code
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
  """Cells whose id contains `only`.

  Raises:
    ConfigError: there are none.
  """
  selected = [cell for cell in cells if only in cell.id]
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
) -> int:
  """Runs what is not done yet; a failure stays with its cell.

  Args:
    cells: the whole grid.
    workdir: gets sweep.json and one folder a cell.
    train_fn: (config, folder of the cell) -> anything; it leaves results.json
      with status done.
    only: runs the cells whose id contains this.
    together: decides which cells train in one program; None: each alone.

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
    files.write_json(workdir / 'sweep.json', _index(cells, workdir))
  except OSError as error:
    raise ConfigError(f'cannot write to --workdir: {error}') from error
  todo = [cell for cell in selected if not is_done(workdir / cell.id)]
  if len(todo) < len(selected):
    done = len(selected) - len(todo)
    logging.info('%d of %d cells are done already', done, len(selected))
  failures: list[Exception] = []
  number = 0
  for group in together.split(cells, todo) if together else [[c] for c in todo]:
    number += sum(cell in todo for cell in group)
    name = group[0].id if len(group) == 1 else f'{len(group)} cells together'
    logging.info('cell %d of %d: %s', number, len(todo), name)
    try:
      errors = _run_group(group, workdir, train_fn, together)
    except Preempted as stop:
      logging.warning('%s: %s', name, stop)
      return stop.exit_code
    for cell, error in zip(group, errors, strict=True):
      if error is not None:
        _report_failure(cell, workdir / cell.id, error)
        # Without its frames, which hold the arrays of the failed cell.
        failures.append(error.with_traceback(None))
    if failures and group[0].config.sweep.fail_fast:
      break
  return _exit_code(failures, len(todo))


def _exit_code(failures: Sequence[Exception], cells: int) -> int:
  if not failures:
    return 0
  bad_input = all(isinstance(error, ConfigError) for error in failures)
  if bad_input and len(failures) == cells:
    return ConfigError.exit_code
  return SOME_FAILED


def check_folder(cell: Cell, workdir: str | os.PathLike) -> None:
  """Refuses the folder of a cell if another config made it.

  Raises:
    ConfigError: names the first fields that differ.
  """
  folder = Path(workdir) / cell.id
  path = folder / 'config.json'
  if not path.exists():
    found = _visible(folder)
    if found:
      raise ConfigError(
        f'{folder} has {found[0]} but no config.json; use another --workdir'
      )
    return
  try:
    old = configure.from_dict(_read_json(path))
  except ConfigError as error:
    raise ConfigError(f'{path}: {error}') from error
  differences = configure.differences(old, cell.config)
  if differences:
    more = f' and {len(differences) - 3} more' if len(differences) > 3 else ''
    raise ConfigError(
      f'{folder} was made with another config: {", ".join(differences[:3])}'
      f'{more}; use another --workdir'
    )


def is_done(folder: Path) -> bool:
  """Whether a cell has its final results."""
  path = folder / 'results.json'
  return path.exists() and _read_json(path).get('status') == 'done'


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


def _index(cells: Sequence[Cell], workdir: Path) -> dict[str, Any]:
  """Content of sweep.json: the grid, then what an earlier grid left here."""
  rows = [{'id': cell.id, 'overrides': dict(cell.overrides)} for cell in cells]
  path = workdir / 'sweep.json'
  if path.exists():
    ids = {cell.id for cell in cells}
    rows += [
      row
      for row in _read_json(path).get('cells', [])
      # One that never started was a slip, or is no longer wanted.
      if row['id'] not in ids and (workdir / row['id']).exists()
    ]
  return {'cells': rows}


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


def _report_failure(cell: Cell, folder: Path, error: Exception) -> None:
  """One line to the log, the rest to error.txt."""
  text = ' '.join(str(error).split('\n', 1)[0].split())
  if not isinstance(error, ConfigError):
    text = f'{type(error).__name__}: {text} (see {folder / "error.txt"})'
  logging.error('error: %s: %s', cell.id, text)
  # A full disk may be the very failure that is reported.
  with contextlib.suppress(OSError):
    text = ''.join(traceback.format_exception(error))
    files.write_text(folder / 'error.txt', text)


def _visible(folder: Path) -> list[str]:
  """Names in a folder, but for temporary files that a kill left."""
  if not folder.exists():
    return []
  names = (path.name for path in folder.iterdir())
  return sorted(name for name in names if not name.startswith('.'))


def _read_json(path: Path) -> dict[str, Any]:
  try:
    content = files.read_json(path)
  except (OSError, ValueError) as error:
    raise ConfigError(f'{path} cannot be read: {error}') from error
  if not isinstance(content, dict):
    raise ConfigError(f'{path} is not a JSON object')
  return content

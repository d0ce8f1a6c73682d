"""The folder of a cell and the index of a sweep, as files."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gamma_jax import configure, files
from gamma_jax.errors import ConfigError


def check_folder(cell, workdir: str | os.PathLike) -> None:
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


def index(cells: Sequence, workdir: Path) -> dict[str, Any]:
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


def report_failure(cell_id: str, folder: Path, error: Exception) -> None:
  """One line to the log, the rest to error.txt."""
  text = ' '.join(str(error).split('\n', 1)[0].split())
  if not isinstance(error, ConfigError):
    text = f'{type(error).__name__}: {text} (see {folder / "error.txt"})'
  logging.error('error: %s: %s', cell_id, text)
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

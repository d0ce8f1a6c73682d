"""The trained model of a cell, wherever its checkpoint lies.

A cell that trained alone has `<cell>/checkpoints`. Cells that trained together
share `<workdir>/populations/<name>/checkpoints`, beside which `members.json`
lists their ids in the order of the members.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gamma_jax import checkpoint, configure, files
from gamma_jax.config import Config
from gamma_jax.errors import ConfigError

POPULATIONS = 'populations'  # folder of a workdir
_MEMBERS = 'members.json'


@dataclasses.dataclass(frozen=True)
class Trained:
  """A cell at one checkpoint.

  Attributes:
    folder: of the cell.
    config: its config.json.
    step: completed updates.
    params: host arrays, as in train_step.TrainState.
    moe_state: host arrays, as there.
  """

  folder: Path
  config: Config
  step: int
  params: dict
  moe_state: dict


def population_name(ids: Sequence[str]) -> str:
  """Name of the folder of cells that train together."""
  digest = hashlib.sha256('\n'.join(ids).encode()).hexdigest()[:12]
  return f'{len(ids)}-{digest}'


def write_members(folder: Path, ids: Sequence[str]) -> None:
  """Says beside the checkpoints of a population whose they are."""
  files.write_json(folder / _MEMBERS, list(ids))


def read_config(cell: Path) -> Config:
  """The config of a cell.

  Raises:
    ConfigError: the folder is not one of a cell.
  """
  path = cell / 'config.json'
  if not path.is_file():
    raise ConfigError(f'{cell} is not the folder of a cell: no config.json')
  try:
    return configure.from_dict(files.read_json(path))
  except (OSError, ValueError) as error:
    raise ConfigError(f'{path} cannot be read: {error}') from error


def checkpoints(cell: Path) -> tuple[Path, int | None, list[int]]:
  """Where the checkpoints of a cell are.

  Returns:
    (folder, number of the member or None for a cell that trained alone,
    complete steps, ascending).

  Raises:
    ConfigError: there is no complete checkpoint.
  """
  cell = Path(cell).resolve()
  alone = cell / 'checkpoints'
  places: list[tuple[Path, int | None]] = [(alone, None)]
  for folder in sorted((cell.parent / POPULATIONS).glob('*')):
    ids = _members(folder)
    if cell.name in ids:
      places.append((folder / 'checkpoints', ids.index(cell.name)))
  for folder, member in places:
    steps = checkpoint.complete_steps(folder)
    if steps:
      return folder, member, steps
  raise ConfigError(f'no complete checkpoint of {cell}; train it first')


def load(cell: Path, step: int | None = None) -> Trained:
  """Reads config, parameters and the state of experts.

  Args:
    cell: its folder.
    step: None takes the newest complete checkpoint.

  Raises:
    ConfigError: not a cell, or no such checkpoint.
  """
  config = read_config(cell)
  folder, member, steps = checkpoints(cell)
  if step is None:
    step = steps[-1]
  if step not in steps:
    known = ', '.join(map(str, steps))
    raise ConfigError(
      f'{cell} has no complete checkpoint {step}; it has {known}'
    )
  params, moe_state = checkpoint.load_model(folder, step, member)
  return Trained(Path(cell), config, step, params, moe_state)


def _members(folder: Path) -> list[str]:
  """Ids of the cells of a population; [] if nothing tells."""
  if (folder / _MEMBERS).is_file():
    return files.read_json(folder / _MEMBERS)
  # Older ones are only named after their members, which follow one another
  # among the cells of one shape. The grid tells the cells.
  index = folder.parent.parent / 'sweep.json'
  size = re.match(r'\d+', folder.name)
  if not size or not index.is_file():
    return []
  ids = [row['id'] for row in files.read_json(index)['cells']]
  n = int(size[0])
  for same in _by_program(folder.parent.parent, ids):
    for start in range(len(same) - n + 1):
      if population_name(same[start : start + n]) == folder.name:
        return same[start : start + n]
  return []


def _by_program(workdir: Path, ids: Sequence[str]) -> list[list[str]]:
  """Ids of cells with a config, those of one program together."""
  groups: dict[Any, list[str]] = {}
  for name in ids:
    if (workdir / name / 'config.json').is_file():
      key = configure.program_key(read_config(workdir / name))
      groups.setdefault(key, []).append(name)
  return list(groups.values())

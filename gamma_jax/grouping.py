"""Which cells of a grid train together in one program.

Groups are made from the whole grid, not from what is left of it, so a sweep
that is stopped and called again finds the same groups and their checkpoints.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Sequence

import jax

from gamma_jax import configure, plan, trained, trainer
from gamma_jax.config import Config, DataConfig, MeshConfig
from gamma_jax.sweep import Cell

FOLDER = trained.POPULATIONS  # of the workdir; the common checkpoints


class Populations:
  """Groups the cells of one workdir and trains a group.

  Args:
    workdir: folder of the sweep.
  """

  def __init__(self, workdir: pathlib.Path):
    self._workdir = workdir

  def split(
    self, cells: Sequence[Cell], todo: Sequence[Cell]
  ) -> list[list[Cell]]:
    """Cells to run, in order, those that go together in one list.

    A group goes together while each of its cells is to do, or is done and was
    so in this group. A cell that failed before, or trains alone, goes alone.
    """
    left = {cell.id for cell in todo}
    groups = []
    for group in self._groups(cells):
      started = (self._workdir / FOLDER / _name(group)).exists()
      together = len(group) > 1 and all(
        not self._alone(cell) and (cell.id in left or started) for cell in group
      )
      if together and any(cell.id in left for cell in group):
        groups.append(group)
      else:
        groups += [[cell] for cell in group if cell.id in left]
    return groups

  def _alone(self, cell: Cell) -> bool:
    folder = self._folder(cell)
    return any((folder / x).exists() for x in ('checkpoints', 'error.txt'))

  def train(self, group: Sequence[Cell]) -> list[Exception | None]:
    """Trains a group; for every cell None, or why it failed."""
    method = _method(group[0].config)
    logging.info('%d cells in one program (%s)', len(group), method)
    folder = self._workdir / FOLDER / _name(group)
    trained.write_members(folder, [cell.id for cell in group])
    results = trainer.train_together(
      [cell.config for cell in group],
      [self._folder(cell) for cell in group],
      folder,
      method,
    )
    return [r if isinstance(r, Exception) else None for r in results]

  def _folder(self, cell: Cell) -> pathlib.Path:
    return self._workdir / cell.id

  def _groups(self, cells: Sequence[Cell]) -> list[list[Cell]]:
    shapes: dict[Config | str, list[Cell]] = {}
    for cell in cells:
      shapes.setdefault(_shape(cell), []).append(cell)
    return [part for group in shapes.values() for part in _parts(group)]


def _shape(cell: Cell) -> Config | str:
  """Equal for cells that can share a program and a loop."""
  config = cell.config
  if config.sweep.population == 'off' or config.mesh != MeshConfig():
    return cell.id  # shares with none: a mesh is for one large model
  # Equal loops, too: what they read, save, log and when they evaluate.
  return dataclasses.replace(
    configure.program_key(config),
    data=dataclasses.replace(config.data, seed=DataConfig().seed),
    checkpoint=config.checkpoint,
    eval=config.eval,
    log=config.log,
    sweep=config.sweep,
  )


def _method(config: Config) -> str:
  asked = config.sweep.population
  if asked != 'auto':
    return asked
  return 'map' if jax.default_backend() == 'cpu' else 'vmap'


def _parts(group: list[Cell]) -> list[list[Cell]]:
  """Cuts a group where its members would not fit in memory together."""
  config = group[0].config
  if len(group) == 1:
    return [group]
  one = sum(plan.bytes_per_device(config, 1).values())
  room = plan.USABLE * plan.total_memory() / 2  # others use the machine too
  most = max(int(room // one), 1) * jax.local_device_count()
  return [group[i : i + most] for i in range(0, len(group), most)]


def _name(group: Sequence[Cell]) -> str:
  return trained.population_name([cell.id for cell in group])

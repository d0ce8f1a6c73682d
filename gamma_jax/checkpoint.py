"""Checkpoints: model state, data iterator and meta, saved as one step.

The only file that imports orbax. Resume order: drop what is unfinished, take
the newest complete step, restore onto the mesh of the current program.

The position of the data is one for all processes (streams.py), so a run may go
on with another number of them. They need a common file system.
"""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from gamma_jax import distributed
from gamma_jax.config import CheckpointConfig

_ITEMS = ('state', 'data', 'meta')
# Orbax writes this file last, when a step is complete.
_COMPLETE = '_CHECKPOINT_METADATA'


def is_complete(step_dir: pathlib.Path) -> bool:
  """True when every item of a step was written to the end."""
  return (step_dir / _COMPLETE).is_file() and all(
    (step_dir / item).is_dir() for item in _ITEMS
  )


def complete_steps(directory: pathlib.Path) -> list[int]:
  """Complete steps under a checkpoint folder, ascending."""
  if not directory.is_dir():
    return []
  steps = [p for p in directory.iterdir() if p.name.isdigit()]
  return sorted(int(p.name) for p in steps if is_complete(p))


class Checkpointer:
  """Saves and restores one run.

  Args:
    directory: `<cell>/checkpoints`.
    config: what to keep.
  """

  def __init__(self, directory: pathlib.Path, config: CheckpointConfig):
    self._dir = pathlib.Path(directory).resolve()
    if distributed.leads():
      self._set_aside_incomplete()
    distributed.barrier('checkpoints')
    keep = [preservation_policy.LatestN(config.keep)]
    if config.keep_every:
      keep.append(preservation_policy.EveryNSteps(config.keep_every))
    self._manager = ocp.CheckpointManager(
      self._dir,
      item_names=_ITEMS,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=preservation_policy.AnyPreservationPolicy(keep),
        cleanup_tmp_directories=True,
      ),
    )

  def _set_aside_incomplete(self) -> None:
    # Orbax would count such a folder as the latest step and then refuse, with
    # a plain False, to save any step up to it.
    if not self._dir.is_dir():
      return
    for path in sorted(self._dir.iterdir()):
      if path.name.isdigit() and not is_complete(path):
        aside = path.with_name(f'incomplete-{path.name}')
        while aside.exists():
          aside = aside.with_name(aside.name + '-again')
        path.rename(aside)
        logging.warning(
          'checkpoint %s is incomplete (a save was cut off); set aside as %s',
          path,
          aside.name,
        )

  def latest_step(self) -> int | None:
    """Newest complete step, or None; the same in every process."""
    step = self._manager.latest_step()
    step = distributed.from_leader(-1 if step is None else step)
    return None if step < 0 else step

  def save(self, step: int, state: Any, iterator, meta: dict) -> None:
    """Starts an asynchronous save of one step.

    Raises:
      RuntimeError: the step was not accepted (already there, or older).
    """
    accepted = self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        data=ocp.args.JsonSave(iterator.get_state()),
        meta=ocp.args.JsonSave(meta),
      ),
      force=True,
    )
    if not accepted:
      raise RuntimeError(
        f'checkpoint of step {step} was refused in {self._dir}: '
        f'it holds step {self._manager.latest_step()}'
      )

  def restore(self, step: int, abstract_state: Any, iterator):
    """Restores one step -> (state on the target shardings, meta).

    `iterator` is moved to the position of the save in place.
    """
    restored = self._manager.restore(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract_state),
        data=ocp.args.JsonRestore(),
        meta=ocp.args.JsonRestore(),
      ),
    )
    iterator.set_state(restored['data'])
    return restored['state'], restored['meta']

  def close(self) -> None:
    """Waits for saves in flight; raises if one of them failed."""
    self._manager.wait_until_finished()
    self._manager.check_for_errors()
    self._manager.close()


def load_state(directory: pathlib.Path, step: int, abstract_state: Any):
  """Restores the model state alone, onto the shardings of `abstract_state`."""
  path = pathlib.Path(directory).resolve() / str(step) / 'state'
  with ocp.StandardCheckpointer() as reader:
    return reader.restore(path, abstract_state)


def load_params(directory: pathlib.Path, step: int | None = None):
  """Loads parameters alone as host arrays, without a config.

  Args:
    directory: a `checkpoints` folder.
    step: None takes the newest complete one.

  Returns:
    (step, nested dict of arrays); of a population trained with 'map', a list
    of such dicts.

  Raises:
    FileNotFoundError: no complete checkpoint there.
  """
  directory = pathlib.Path(directory).resolve()
  steps = complete_steps(directory)
  if not steps or (step is not None and step not in steps):
    raise FileNotFoundError(
      f'no complete checkpoint{"" if step is None else f" {step}"} in '
      f'{directory}; complete: {steps}'
    )
  step = steps[-1] if step is None else step
  with ocp.StandardCheckpointer() as reader:
    state = reader.restore(directory / str(step) / 'state')
  if isinstance(state, list):  # a population, one state a member
    return step, [member['params'] for member in state]
  return step, state['params']


def load_model(directory: pathlib.Path, step: int, member: int | None = None):
  """What a model needs to be applied, as host arrays, without its optimizer.

  It needs none of the devices that the run had.

  Args:
    directory: a `checkpoints` folder.
    step: a complete one.
    member: which one of a population; None for a cell that trained alone.

  Returns:
    (params, moe_state), as in train_step.TrainState.
  """
  path = pathlib.Path(directory).resolve() / str(step) / 'state'
  tree = ocp.PyTreeCheckpointHandler().metadata(path).tree

  def wanted(state):
    return {key: state[key] for key in ('params', 'moe_state')}

  apart = isinstance(tree, list)  # 'map': one state a member
  item = [wanted(one) for one in tree] if apart else wanted(tree)
  state = ocp.PyTreeCheckpointer().restore(
    path,
    args=ocp.args.PyTreeRestore(
      item=item,
      restore_args=jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item
      ),
      partial_restore=True,
    ),
  )
  if apart:
    state = state[member]
  elif member is not None:  # 'vmap': members stacked on axis 0
    state = jax.tree.map(lambda x: x[member], state)
  return state['params'], state['moe_state']

"""Many processes that train one model: start-up, agreement, who keeps files.

Every process runs the same program on the same global batches. Process 0, the
leader, decides what is next and keeps the files; the others follow it, and
write theirs to a scratch folder, so that no code that writes has to know.
If one process dies, the others end within HEARTBEAT_SECONDS: start them all
again and they go on from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gamma_jax.errors import ConfigError, NonFiniteLoss, Preempted

AUTO = 'auto'  # a coordinator that JAX finds itself: SLURM, GKE, TPU pods
HEARTBEAT_SECONDS = 60
# What the leader sends in place of the index of a cell.
_WAIT, _END = -1, -2
# What fails in all processes alike, so that they can go on together.
_SHARED = (ConfigError, NonFiniteLoss, Preempted)


def initialize(coordinator: str, process_count: int, process_id: int) -> bool:
  """Joins the processes; must come before the first use of a device.

  Args:
    coordinator: HOST:PORT of process 0, or AUTO; '' is a process of its own.
    process_count: how many there are; -1 with AUTO.
    process_id: which one this is; -1 with AUTO.

  Returns:
    Whether there was anything to join.

  Raises:
    ConfigError: they cannot be joined.
  """
  if not coordinator:
    return False
  where: dict[str, Any] = {}
  if coordinator != AUTO:
    where = {
      'coordinator_address': coordinator,
      'num_processes': process_count,
      'process_id': process_id,
      # All devices of the host, also where SLURM would give it one of them.
      'cluster_detection_method': 'deactivate',
    }
  try:
    jax.distributed.initialize(
      **where, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
    )
  except (ValueError, RuntimeError) as error:
    text = ' '.join(str(error).split())
    raise ConfigError(
      f'--coordinator={coordinator}: cannot join the processes: {text}'
    ) from error
  return True


def check() -> None:
  """Refuses processes that share devices but were never joined (TPU pods).

  Raises:
    ConfigError: says which flag joins them.
  """
  if jax.process_count() > 1 and not jax.distributed.is_initialized():
    raise ConfigError(
      f'{jax.process_count()} processes share these devices; add '
      f'--coordinator={AUTO}'
    )


def alone() -> bool:
  """Whether one process has all devices of the run."""
  return jax.process_count() == 1


def leads() -> bool:
  """Whether this is the process that keeps the files; alone, it is."""
  return jax.process_index() == 0


def from_leader(value: int) -> int:
  """The leader's value, in every process."""
  return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def barrier(name: str) -> None:
  """Waits until every process is here."""
  if not alone():
    multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
  """`folder` for the leader; for the others one that is thrown away."""
  if leads():
    yield folder
    return
  with tempfile.TemporaryDirectory() as scratch:
    yield Path(scratch) / folder.name


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
  """Fails in every process if the block fails in one of them.

  The block must not compute together: a process that has failed is missed.

  Raises:
    ConfigError: it failed in another process.
  """
  try:
    yield
  except Exception:
    _failed(True)
    raise
  failed = _failed(False)
  if failed.any():
    raise ConfigError(
      f'{what} failed in process {int(np.argmax(failed))}; see its log'
    )


def _failed(here: bool) -> np.ndarray:
  """`here` of every process, in order."""
  if alone():
    return np.array([here])
  return multihost_utils.process_allgather(np.array(here))


class Vote:
  """What every process says at a step, known to all one step later.

  A step late, because reading it at once would wait for the devices. Alone,
  the answer is immediate.
  """

  def __init__(self):
    self._sent = None
    if not alone():
      mesh = jax.make_mesh(
        (jax.device_count(),),
        ('all',),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices(),
      )
      self._where = jax.NamedSharding(mesh, jax.P('all'))
      everywhere = jax.NamedSharding(mesh, jax.P())
      self._gather = jax.jit(lambda x: x, out_shardings=everywhere)

  def stop(self, asked: bool, batch_crc: int) -> bool:
    """Whether all are to stop now: one of them was asked to.

    Args:
      asked: whether this process was.
      batch_crc: of the global batch that it read.

    Raises:
      RuntimeError: the processes read different batches.
    """
    if alone():
      return asked
    mine = np.array([[asked, batch_crc]], np.uint32)
    votes = jax.make_array_from_callback(
      (jax.device_count(), 2), self._where, lambda _: mine
    )
    sent, self._sent = self._sent, self._gather(votes)
    if sent is None:
      return False
    stops, crcs = np.asarray(sent).T
    if (crcs != crcs[0]).any():
      raise RuntimeError(
        'the processes read different batches: is data.source the same file '
        'on every host?'
      )
    return bool(stops.any())


class Leader:
  """Process 0 of many: tells the others which cell is next.

  Args:
    cells: sweep.Cell objects, the same list in every process.
    train: (config, folder) -> results.
  """

  def __init__(self, cells: Sequence, train: Callable):
    self._cells, self._train = list(cells), train

  def train(self, config, folder: Path):
    """Trains one cell in all processes."""
    index = next(i for i, c in enumerate(self._cells) if c.id == folder.name)
    _send(index, self._cells[index])
    with _or_abort():
      return self._train(config, folder)

  def wait(self, seconds: float) -> None:
    """Keeps the others waiting, in touch."""
    _send(_WAIT)
    time.sleep(seconds)

  def run(self, sweep: Callable[[], int]) -> int:
    """Calls `sweep`; all processes end with its exit code."""
    try:
      code = sweep()
    except ConfigError as error:
      self._end(error.exit_code)
      raise
    self._end(code)
    return code

  def _end(self, code: int) -> None:
    _send(_END)
    from_leader(code)


def follow(cells: Sequence, workdir: Path, train: Callable) -> int:
  """What the other processes do: train what the leader says.

  Args:
    cells: as in Leader.
    workdir: of the sweep.
    train: as in Leader.

  Returns:
    The leader's exit code.
  """
  while True:
    index, theirs = _receive()
    if index == _END:
      return from_leader(0)
    if index == _WAIT:
      continue
    cell = cells[index]
    with contextlib.suppress(*_SHARED), _or_abort():
      with together('the start'):
        _check_same(cell, theirs)
        _check_shared(workdir / cell.id)
      train(cell.config, workdir / cell.id)


def _send(index: int, cell=None) -> None:
  digest = 0 if cell is None else _digest(cell)
  multihost_utils.broadcast_one_to_all(np.array([index, digest], np.int32))
  if cell is not None:
    with together('the start'):
      pass


def _receive() -> tuple[int, int]:
  got = multihost_utils.broadcast_one_to_all(np.zeros(2, np.int32))
  return int(got[0]), int(got[1])


def _digest(cell) -> int:
  text = repr((cell.id, cell.config))
  return zlib.crc32(text.encode()) & 0x7FFFFFFF  # int32 without x64


def _check_same(cell, digest: int) -> None:
  if _digest(cell) != digest:
    raise ConfigError(
      f'cell {cell.id} is another one in process 0; give every process the '
      'same command'
    )


def _check_shared(folder: Path) -> None:
  """The leader has written config.json: every process must see it."""
  for _ in range(20):  # network file systems show a new file late
    if (folder / 'config.json').exists():
      return
    time.sleep(0.5)
  raise ConfigError(
    f'{folder} is not there in process {jax.process_index()}; --workdir must '
    'be on a file system that all hosts share'
  )


@contextlib.contextmanager
def _or_abort() -> Iterator[None]:
  """Ends this process on an error that the others may not have.

  They wait for it in the middle of a step; its missing heartbeat ends them.
  """
  try:
    yield
  except _SHARED:
    raise
  except Exception:
    traceback.print_exc()
    logging.error(
      'process %d stops, and the others with it within %d s; run the same '
      'command to go on',
      jax.process_index(),
      HEARTBEAT_SECONDS,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # a normal exit would wait for the others

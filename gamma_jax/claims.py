"""Who runs which cell: workers on many hosts share the grid of one folder.

A claim is a file `<cell>.<number>`, made by an atomic exclusive create, which
local disks, NFS, Lustre and GPFS have. The highest number counts. Its holder
touches it; one that is dead, or silent for SILENCE seconds, loses the cell to
whoever makes the next number. Files are never deleted, so two that see the
same dead holder cannot both win.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

SILENCE = 300.0  # seconds; a worker that was paused longer has lost its cell
BEAT = 20.0


class Claims:
  """The claims of one worker.

  Args:
    folder: common to all workers; made when it is not there.
  """

  def __init__(self, folder: Path):
    self._folder = folder
    folder.mkdir(parents=True, exist_ok=True)
    self._me = {'host': socket.gethostname(), 'pid': os.getpid()}
    self._me['started'] = _started(os.getpid())
    # What had ended when this worker began: a failure of then is tried again.
    self._ended = {
      name: number
      if 'outcome' in _read(self._path(name, number))
      else number - 1
      for name, number in self._newest().items()
    }

  @contextlib.contextmanager
  def holding(self, names: Sequence[str]) -> Iterator[Outcomes | None]:
    """Holds all of `names` for a while, or yields None if it cannot."""
    held: dict[str, Path] = {}
    outcomes = Outcomes()
    for name in names:
      path = self._take(name)
      if path is None:
        for taken in held.values():
          _write(taken, {'outcome': 'left'})
        yield None
        return
      held[name] = path
    stop = threading.Event()
    beat = threading.Thread(target=_beat, args=(held, stop), daemon=True)
    beat.start()
    try:
      yield outcomes
    finally:
      stop.set()
      beat.join()
      for name, path in held.items():
        _write(path, self._me | {'outcome': outcomes.get(name, 'left')})

  def failed(self, name: str) -> bool:
    """Whether the cell failed, here or elsewhere, since this worker began."""
    return any(
      _read(self._path(name, number)).get('outcome') == 'failed'
      for number in range(
        self._ended.get(name, -1) + 1, self._newest().get(name, -1) + 1
      )
    )

  def _take(self, name: str) -> Path | None:
    number = self._newest().get(name, -1)
    if number >= 0 and self._alive(self._path(name, number)):
      return None
    path = self._path(name, number + 1)
    try:
      with open(path, 'x') as file:
        json.dump(self._me, file)
    except FileExistsError:  # another worker was faster
      return None
    return path

  def _alive(self, path: Path) -> bool:
    holder = _read(path)
    if 'outcome' in holder:
      return False
    if holder.get('host') == self._me['host']:
      # A number of a process is used again; when it started tells them apart.
      return _started(holder['pid']) == holder['started'] is not None
    # By the clock of the file server, which all workers share.
    clock = self._folder / f'.clock-{self._me["host"]}-{self._me["pid"]}'
    clock.touch()
    now = clock.stat().st_mtime
    clock.unlink()
    return now - path.stat().st_mtime < SILENCE

  def _newest(self) -> dict[str, int]:
    newest: dict[str, int] = {}
    for path in self._folder.iterdir():
      name, _, number = path.name.rpartition('.')
      if number.isdigit():
        newest[name] = max(int(number), newest.get(name, -1))
    return newest

  def _path(self, name: str, number: int) -> Path:
    return self._folder / f'{name}.{number}'


class Outcomes(dict[str, str]):
  """Cell -> 'done' or 'failed', filled in by who holds the claims."""


def _beat(held: dict[str, Path], stop: threading.Event) -> None:
  while not stop.wait(BEAT):
    for name, path in held.items():
      number = int(path.suffix[1:])
      if path.with_name(f'{name}.{number + 1}').exists():
        logging.error('%s: another worker took over; this one ends', name)
        os._exit(1)  # two must not write one folder
      with contextlib.suppress(OSError):  # the file server may be back soon
        os.utime(path)


def _read(path: Path) -> dict:
  try:
    return json.loads(path.read_text())
  except ValueError:  # just made, or its maker died making it
    return {}


def _write(path: Path, content: dict) -> None:
  path.write_text(json.dumps(content))


def _started(pid: int) -> str | None:
  """When a process of this host began; None if there is none."""
  try:
    stat = Path(f'/proc/{pid}/stat').read_text()
  except OSError:
    return None
  # The name, in brackets, may hold anything; the 22nd field is the start.
  state, *rest = stat.rpartition(')')[2].split()
  return None if state == 'Z' else rest[18]

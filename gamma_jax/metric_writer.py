"""Where the numbers of a run go: metrics.jsonl, and TensorBoard on request.

metrics.jsonl is the record: append only, one line a step, steps strictly
increasing. On several hosts only process 0 makes a writer.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gamma_jax import errors, files


class MetricWriter(Protocol):
  """Takes the metrics of one step at a time."""

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Steps must grow from call to call."""
    ...

  def close(self) -> None:
    """Brings everything to disk."""
    ...


class JsonlWriter:
  """Appends `{"step": ..., name: value, ...}`, flushed line by line.

  Opening repairs what a kill left behind: a torn last line goes, and with
  `resume_step` every line after it too, since those steps will come again.
  So write the metrics of step s before its checkpoint.

  Args:
    path: the metrics.jsonl.
    resume_step: last step to keep; None keeps all and goes on after the last.
  """

  def __init__(self, path: str | os.PathLike, resume_step: int | None = None):
    self._path = Path(path)
    old = ''
    if self._path.exists():
      old = self._path.read_text(encoding='utf-8', errors='replace')
    kept = _parse(old, self._path)
    if resume_step is not None:
      kept = [m for m in kept if m['step'] <= resume_step]
    text = ''.join(files.to_json(m) + '\n' for m in kept)
    if text != old:
      files.write_text(self._path, text)
    self._last = kept[-1]['step'] if kept else None
    self._path.parent.mkdir(parents=True, exist_ok=True)
    self._file = open(self._path, 'a', encoding='utf-8')

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Raises ValueError when `step` does not grow."""
    if self._last is not None and step <= self._last:
      raise ValueError(
        f'{self._path}: step {step} after step {self._last}; steps must grow'
      )
    line = {'step': int(step)}
    line |= {name: _number(value) for name, value in metrics.items()}
    self._file.write(files.to_json(line) + '\n')
    self._file.flush()
    self._last = step

  def close(self) -> None:
    """Syncs and closes; a second call does nothing."""
    if not self._file.closed:
      os.fsync(self._file.fileno())
      self._file.close()


class TensorBoardWriter:
  """Scalars for TensorBoard; needs the extra `tb`.

  Events reach the disk within a second, not at once: after a kill, TensorBoard
  may miss steps that metrics.jsonl has.

  Args:
    folder: where event files go.
    resume_step: hides older events of later steps, which will come again.
  """

  def __init__(self, folder: str | os.PathLike, resume_step: int | None = None):
    try:
      import tensorboardX
    except ImportError as e:
      raise errors.ConfigError(
        'log.tensorboard needs tensorboardX: pip install gamma_jax[tb]'
      ) from e
    self._writer = tensorboardX.SummaryWriter(
      str(folder),
      purge_step=None if resume_step is None else resume_step + 1,
      flush_secs=1,
    )

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """One scalar a metric."""
    for name, value in metrics.items():
      self._writer.add_scalar(name, float(value), int(step))

  def close(self) -> None:
    """Waits for the events to be written."""
    self._writer.close()


class MultiWriter:
  """Writes to each of `writers` in order."""

  def __init__(self, writers: Sequence[MetricWriter]):
    self._writers = tuple(writers)

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """One step to all."""
    for writer in self._writers:
      writer.write(step, metrics)

  def close(self) -> None:
    """Closes all, also when one of them fails."""
    with contextlib.ExitStack() as stack:
      for writer in self._writers:
        stack.callback(writer.close)


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Lines of a metrics.jsonl; a torn last line (a run at work) is left out."""
  return _parse(Path(path).read_text(encoding='utf-8', errors='replace'), path)


def to_csv(jsonl_path: str | os.PathLike, csv_path: str | os.PathLike) -> None:
  """The same numbers as a table; a metric absent at a step is left empty."""
  rows = read_metrics(jsonl_path)
  columns = list(dict.fromkeys(['step', *(name for m in rows for name in m)]))
  text = io.StringIO()
  table = csv.DictWriter(text, columns, restval='', lineterminator='\n')
  table.writeheader()
  table.writerows(rows)
  files.write_text(csv_path, text.getvalue())


def _parse(text: str, path: str | os.PathLike) -> list[dict[str, Any]]:
  lines = text.removesuffix('\n').split('\n') if text else []
  metrics = []
  for number, line in enumerate(lines, start=1):
    try:
      metrics.append(files.from_json(line))
    except json.JSONDecodeError:
      if number == len(lines):
        break
      raise errors.ConfigError(
        f'{path}: line {number} is not JSON; restore the file or move it away'
      ) from None
  return metrics


def _number(value: Any) -> int | float:
  return value if isinstance(value, int) else float(value)

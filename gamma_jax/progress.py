"""Training progress: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

import rich.console
import rich.progress


class Progress:
  """Shows step, loss, tokens/s and time left.

  Args:
    label: name of the cell.
    total: steps of the run.
    start: steps already done.
    console: where to print; None takes standard output.
  """

  def __init__(
    self,
    label: str,
    total: int,
    start: int = 0,
    console: rich.console.Console | None = None,
  ):
    self._console = console or rich.console.Console()
    self._label, self._total = label, total
    self._first, self._began = start, time.monotonic()
    self._next_line = self._began
    self._bar = None
    if self._console.is_terminal:
      self._bar = rich.progress.Progress(
        rich.progress.TextColumn('{task.description}'),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn('{task.fields[numbers]}'),
        rich.progress.TimeRemainingColumn(),
        console=self._console,
      )
      self._task = self._bar.add_task(
        label, total=total, completed=start, numbers=''
      )
      self._bar.start()

  def update(self, step: int, loss: float, tokens_per_second: float) -> None:
    """Reports a finished step; plain lines come every few seconds."""
    numbers = f'loss {loss:.4f}  {tokens_per_second:,.0f} tok/s'
    if self._bar is not None:
      self._bar.update(self._task, completed=step, numbers=numbers)
      return
    now = time.monotonic()
    if now < self._next_line and step != self._total:
      return
    self._next_line = now + 10
    rate = (now - self._began) / max(step - self._first, 1)
    left = (self._total - step) * rate
    self._console.print(
      f'{self._label}  step {step}/{self._total}  {numbers}  eta {left:.0f}s',
      highlight=False,
      soft_wrap=True,
    )

  def close(self) -> None:
    """Stops the live display."""
    if self._bar is not None:
      self._bar.stop()

"""The files of one cell while it trains: metrics, init report, results."""

from __future__ import annotations

import math
import pathlib

from gamma_jax import (
  files,
  init_report,
  init_table,
  mechanics,
  metric_writer,
)
from gamma_jax.config import Config
from gamma_jax.errors import NonFiniteLoss


class Member:
  """One cell of a run.

  Args:
    config: the cell.
    folder: its folder.
    past: what `progress` returned at the checkpoint that is resumed from;
      empty for a fresh start.
    step: step of that checkpoint.

  Attributes:
    tokens: scored tokens seen, counted from real labels.
    initial_norms: Frobenius norms of the initial weights, by metric name;
      empty where mechanics were not logged.
    failure: why the cell stopped, or None.
  """

  def __init__(
    self, config: Config, folder: pathlib.Path, past: dict, step: int
  ):
    self.config, self.folder = config, folder
    self.tokens: int = past.get('tokens', 0)
    self.initial_norms: dict[str, float] = past.get('initial_norms', {})
    self._last: dict[str, float] = past.get('last', {})
    message = past.get('failure')
    self.failure = None if message is None else NonFiniteLoss(message)
    path = folder / 'metrics.jsonl'
    if not past:
      step = -1  # a line of step 0 is made again too
    writers = [metric_writer.JsonlWriter(path, resume_step=step)]
    if config.log.tensorboard:
      writers.append(
        metric_writer.TensorBoardWriter(
          folder / 'tensorboard', resume_step=step
        )
      )
    self._writer = metric_writer.MultiWriter(writers)

  def progress(self) -> dict:
    """What a checkpoint must remember of this cell."""
    failure = None if self.failure is None else str(self.failure)
    return {
      'tokens': self.tokens,
      'initial_norms': self.initial_norms,
      'last': self._last,
      'failure': failure,
    }

  def report_init(self, report: init_report.InitReport) -> None:
    """Says what the run starts from, and stops it if that is not its rule."""
    files.write_json(self.folder / 'init_report.json', report.to_dict())
    text = init_table.as_text(report)
    files.write_text(self.folder / 'init_report.txt', text)
    for line in init_table.summary(report):
      print(line)
    report.raise_if_off()

  def log_start(self, line: dict[str, float]) -> None:
    """Writes the mechanics of the initial weights, and keeps their norms."""
    self.initial_norms = mechanics.norms(line)
    self._writer.write(0, line)

  def log(self, step: int, line: dict[str, float]) -> bool:
    """Writes the metrics of a step; False when the cell just failed.

    Args:
      step: the finished update.
      line: metrics; 'train/tokens' is replaced by the running count.
    """
    if self.failure is not None:
      return False
    loss, norm = line['train/loss'], line['opt/grad_norm']
    if not (math.isfinite(loss) and math.isfinite(norm)):
      self.failure = NonFiniteLoss(
        f'step {step}: loss {loss}, gradient norm {norm}'
      )
      return False
    self.tokens += int(line.pop('train/tokens'))
    line['train/tokens_seen'] = self.tokens
    self._last = {'train/loss_last': loss}
    last = step == self.config.train.steps
    rare = any(name.startswith(('heldout/', 'condense/')) for name in line)
    if last or rare or step % self.config.log.every == 0:
      self._writer.write(step, line)
    return True

  def finish(self, heldout: dict[str, float], timing: dict) -> dict:
    """Writes and returns results.json."""
    self.close()
    metric_writer.to_csv(
      self.folder / 'metrics.jsonl', self.folder / 'metrics.csv'
    )
    counted = {'train/tokens_seen': self.tokens}
    results = {
      'status': 'done',
      'steps': self.config.train.steps,
      'metrics': heldout | self._last | counted,
      'timing': timing,
    }
    files.write_json(self.folder / 'results.json', results)
    return results

  def close(self) -> None:
    """Brings the metrics to disk; a second call does nothing."""
    self._writer.close()

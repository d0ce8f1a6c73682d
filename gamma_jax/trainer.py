"""One run: restore or start, step, log, evaluate, save, finish.

Resume order: newest complete checkpoint (state, data iterator, tokens seen);
metric lines beyond it are dropped and made again, bit for bit.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pathlib
import signal
import threading
import time
import zlib

import jax
import numpy as np

from gamma_jax import (
  checkpoint,
  configure,
  evaluate,
  files,
  flops,
  metric_writer,
  plan,
  progress,
  provenance,
  train_step,
)
from gamma_jax.config import Config
from gamma_jax.data import pipeline, tokenizer
from gamma_jax.errors import ConfigError, NonFiniteLoss, Preempted


class _Preemption:
  """Turns SIGTERM into a flag that the loop reads between steps."""

  def __init__(self):
    self.asked = False
    self._old = None

  def __enter__(self):
    # Handlers can only be set from the main thread; elsewhere (a notebook's
    # worker) preemption stays the caller's business.
    if threading.current_thread() is threading.main_thread():
      self._old = signal.signal(signal.SIGTERM, self._ask)
    return self

  def _ask(self, *_):
    self.asked = True

  def __exit__(self, *_):
    if self._old is not None:
      signal.signal(signal.SIGTERM, self._old)


class _Run:
  """The moving parts of one run.

  Attributes:
    step: completed updates.
    tokens: scored tokens seen, counted from real labels.
  """

  def __init__(self, config: Config, cell: pathlib.Path):
    self.config = config
    self.cell = cell
    self.program = train_step.build(configure.program_key(config))
    self.hyper = train_step.hyper(config)
    self.tokenizer = tokenizer.load_tokenizer(config.data.tokenizer)
    if self.tokenizer.vocab_size > config.model.V:
      raise ConfigError(
        f'model.V={config.model.V} is smaller than the vocabulary of '
        f'tokenizer {config.data.tokenizer} ({self.tokenizer.vocab_size})'
      )
    self.iterator = pipeline.train_iterator(
      config.data,
      seed=config.seed if config.data.seed is None else config.data.seed,
      batch_size=config.train.batch_size // jax.process_count(),
      seq_len=config.train.seq_len,
      process_index=jax.process_index(),
      process_count=jax.process_count(),
    )
    self.checkpointer = checkpoint.Checkpointer(
      cell / 'checkpoints', config.checkpoint
    )
    self.flops_per_token = flops.flops_per_token(
      config.model, config.train.seq_len
    )
    self._pending = None
    self._clock = time.monotonic()
    self._restore_or_init()
    self.writer = self._open_writer()

  def _restore_or_init(self):
    latest = self.checkpointer.latest_step()
    if latest is None:
      self.state = self.program.init(self.hyper)
      self.step, self.tokens, self.last = 0, 0, {}
      return
    self.state, meta = self.checkpointer.restore(
      latest, self.program.abstract_state, self.iterator
    )
    self.step, self.tokens, self.last = latest, meta['tokens'], meta['last']
    logging.info('resumed from step %d of %s', latest, self.cell)

  def _open_writer(self):
    writers = [
      metric_writer.JsonlWriter(
        self.cell / 'metrics.jsonl', resume_step=self.step
      )
    ]
    if self.config.log.tensorboard:
      writers.append(
        metric_writer.TensorBoardWriter(
          self.cell / 'tensorboard', resume_step=self.step
        )
      )
    return metric_writer.MultiWriter(writers)

  def advance(self):
    """Dispatches one step, then logs the one before it."""
    batch = next(self.iterator)
    self.state, out = self.program.step(
      self.state, self.hyper, self.program.put_batch(batch)
    )
    self.step += 1
    crc = zlib.crc32(np.ascontiguousarray(batch['tokens']))
    previous, self._pending = self._pending, (self.step, out, crc)
    return self._log(previous)

  def flush(self, extra: dict | None = None):
    """Logs the step in flight, with evaluation metrics in the same line."""
    previous, self._pending = self._pending, None
    return self._log(previous, extra)

  def _log(self, pending, extra=None):
    if pending is None:
      return None
    step, out, crc = pending
    line = {k: float(v) for k, v in jax.device_get(out).items()}
    tokens = int(line.pop('train/tokens'))
    if not (
      math.isfinite(line['train/loss']) and math.isfinite(line['opt/grad_norm'])
    ):
      raise NonFiniteLoss(
        f'step {step}: loss {line["train/loss"]}, gradient norm '
        f'{line["opt/grad_norm"]}; the last good checkpoint is kept'
      )
    self.tokens += tokens
    self.last = {'train/loss_last': line['train/loss']}
    now = time.monotonic()
    seconds, self._clock = max(now - self._clock, 1e-9), now
    line |= {
      'train/tokens_seen': self.tokens,
      'data/batch_crc32': crc,
      'perf/tokens_per_second': tokens / seconds,
      'perf/model_flops_per_second': tokens * self.flops_per_token / seconds,
    } | (extra or {})
    if extra or step % self.config.log.every == 0 or step == self._end:
      self.writer.write(step, line)
    return step, line

  @property
  def _end(self) -> int:
    return self.config.train.steps

  def save(self):
    """Saves the current step; every metric up to it is logged first."""
    meta = {'tokens': self.tokens, 'last': self.last}
    self.checkpointer.save(self.step, self.state, self.iterator, meta)

  def evaluate(self) -> dict[str, float]:
    """Held-out metrics of the current parameters."""
    batches = pipeline.eval_batches(
      self.config.data,
      seq_len=self.config.train.seq_len,
      batch_size=self.config.eval.batch_size,
      documents=self.config.eval.documents,
    )
    out = evaluate.evaluate(
      self.program,
      self.state.params,
      self.hyper,
      batches,
      pipeline.heldout_sources(self.config.data),
      self.tokenizer.token_bytes,
    )
    self._clock = time.monotonic()  # evaluation is no training time
    return out

  def close(self) -> None:
    """Waits for the saves in flight; raises if one of them failed."""
    self.writer.close()
    self.checkpointer.close()


def _loop(run: _Run, bar: progress.Progress, preemption: _Preemption) -> None:
  """Steps to the end, saving on schedule, at the end and on SIGTERM."""
  config = run.config
  while run.step < config.train.steps:
    logged = run.advance()
    last = run.step == config.train.steps
    scheduled = run.step % config.checkpoint.every == 0
    evaluating = config.eval.every and run.step % config.eval.every == 0
    if last or scheduled or evaluating or preemption.asked:
      logged = run.flush(run.evaluate() if evaluating and not last else None)
    if last or scheduled or preemption.asked:
      run.save()
    if logged:
      step, line = logged
      bar.update(step, line['train/loss'], line['perf/tokens_per_second'])
    if preemption.asked and not last:
      raise Preempted(f'SIGTERM at step {run.step}: saved; run again to go on')


def train(config: Config, cell: pathlib.Path) -> dict:
  """Trains one cell to its end, from wherever its folder stands.

  Args:
    config: a validated config.
    cell: the cell's folder; config.json in it is the caller's business.

  Returns:
    The content of results.json.

  Raises:
    ConfigError: the run cannot start (memory, devices, data, vocabulary).
    Preempted: SIGTERM came and the state was saved.
    NonFiniteLoss: names the step; nothing after the last checkpoint is kept.
  """
  configure.check_devices(config, jax.device_count())
  plan.check_fits(config)
  attempt = provenance.start(cell / 'run.json', configure.config_hash(config))
  reason = 'error'
  try:
    with _Preemption() as preemption:
      results = _train(config, cell, preemption)
    reason = 'done'
    return results
  except Preempted:
    reason = 'preempted'
    raise
  except Exception as error:
    reason = f'{type(error).__name__}: {error}'
    raise
  finally:
    provenance.finish(cell / 'run.json', attempt, reason)


def _train(config: Config, cell: pathlib.Path, preemption: _Preemption):
  began = time.monotonic()
  with contextlib.closing(_Run(config, cell)) as run:
    resumed_at = run.step
    bar = progress.Progress(cell.name, config.train.steps, run.step)
    with contextlib.closing(bar):
      _loop(run, bar, preemption)
    heldout = run.evaluate()
  # Closed: the final save is on disk, or its error has been raised.
  metric_writer.to_csv(cell / 'metrics.jsonl', cell / 'metrics.csv')
  results = {
    'status': 'done',
    'steps': run.step,
    'metrics': heldout | run.last | {'train/tokens_seen': run.tokens},
    'timing': {
      'seconds': time.monotonic() - began,
      'steps_timed': run.step - resumed_at,
    },
  }
  files.write_json(cell / 'results.json', results)
  return results

"""The loop: restore or start, step, log, evaluate, save, finish.

It trains the members of an engine (population.py): one cell, or many in one
program. Resume order: newest complete checkpoint (state, data, counts);
metric lines beyond it are dropped and made again, bit for bit.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import time
import zlib
from collections.abc import Sequence

import jax
import numpy as np

from gamma_jax import (
  checkpoint,
  configure,
  distributed,
  files,
  flops,
  heldout,
  init_report,
  mechanics,
  plan,
  population,
  progress,
  provenance,
  sharding,
  streams,
  trained,
)
from gamma_jax import program as program_lib
from gamma_jax.config import Config
from gamma_jax.errors import Preempted
from gamma_jax.member import Member
from gamma_jax.preemption import Preemption
from gamma_jax.tasks import runner


class Run:
  """The moving parts of a run of P members.

  Args:
    configs: the members; one shape.
    cells: their folders.
    folder: where `checkpoints` lies.
    method: 'single', 'map' or 'vmap'.

  Attributes:
    step: completed updates.
    crcs: of the tokens of the last batch of each data stream.
  """

  def __init__(
    self,
    configs: Sequence[Config],
    cells: Sequence[pathlib.Path],
    folder: pathlib.Path,
    method: str,
  ):
    self.config = one = configs[0]
    with distributed.together('reading the data'):
      heldout.check_vocabulary(one)
      self._tasks = runner.load(one)
      self._streams = streams.Streams(configs)
    self.engine = _engine(configs, self._streams.member, method)
    self._checkpointer = checkpoint.Checkpointer(
      folder / 'checkpoints', one.checkpoint
    )
    self._flops = flops.flops_per_token(one.model, one.train.seq_len)
    self._inputs_per_label = streams.inputs_per_label(one)
    self._pending = None
    self.crcs: list[int] = []
    latest = self._checkpointer.latest_step()
    if latest is None:
      self.state, self.step, past = self.engine.init(), 0, {}
    else:
      self.state, meta = self._checkpointer.restore(
        latest, self.engine.abstract_state, self._streams
      )
      self.step, past = latest, meta['members']
      logging.info('resumed from step %d of %s', latest, folder)
    self.members = [
      Member(config, cell, past[i] if past else {}, self.step)
      for i, (config, cell) in enumerate(zip(configs, cells, strict=True))
    ]
    self._mechanics = mechanics.Mechanics(self.engine, configs)
    if latest is None:
      self._report_init()
      self._log_start()
    self._clock = time.monotonic()

  def _report_init(self):
    # Its own streams, so that nothing of the run is consumed.
    fresh = streams.Streams([m.config for m in self.members])
    batches = next(fresh)
    for i, member in enumerate(self.members):
      report = init_report.measured(
        member.config,
        self.engine.program,
        self.engine.weights(self.state, i)[0],
        batches[fresh.member[i]],
      )
      member.report_init(report)

  def _log_start(self):
    measured = self._mechanics.measure(self.state, 0)
    for member, values in zip(self.members, measured or (), strict=False):
      member.log_start(self._mechanics.line(values))

  def advance(self):
    """Dispatches one step, then logs the one before it."""
    batches = next(self._streams)
    self.state, out = self.engine.step(self.state, batches)
    self.step += 1
    self.crcs = [zlib.crc32(np.ascontiguousarray(b['tokens'])) for b in batches]
    measured = self._mechanics.measure(self.state, self.step)
    pending = self.step, out, self.crcs, measured
    previous, self._pending = self._pending, pending
    return self._log(previous, None)

  def flush(self, evaluated: list[dict] | None = None):
    """Logs the step in flight, with evaluation metrics in the same line."""
    previous, self._pending = self._pending, None
    return self._log(previous, evaluated)

  def _log(self, pending, evaluated):
    """Returns (step, mean loss of the members still going, tokens/s)."""
    if pending is None:
      return None
    step, out, crcs, measured = pending
    values = {k: np.atleast_1d(v) for k, v in jax.device_get(out).items()}
    now = time.monotonic()
    seconds, self._clock = max(now - self._clock, 1e-9), now
    losses, total = [], 0.0
    for i, member in enumerate(self.members):
      line = {k: float(v[i]) for k, v in values.items()}
      rate = line['train/tokens'] * self._inputs_per_label / seconds
      line['data/batch_crc32'] = crcs[self._streams.member[i]]
      line['perf/tokens_per_second'] = rate
      line['perf/model_flops_per_second'] = rate * self._flops
      line |= evaluated[i] if evaluated else {}
      if measured:
        line |= self._mechanics.line(measured[i], member.initial_norms)
      failed_before = member.failure is not None
      if member.log(step, line):
        losses.append(line['train/loss'])
        total += rate
      elif not failed_before:
        logging.error('%s: %s', member.folder.name, member.failure)
    if not losses:
      raise next(m.failure for m in self.members if m.failure)
    return step, float(np.mean(losses)), total

  def save(self):
    """Saves the current step; every metric up to it is logged first."""
    meta = {'members': [m.progress() for m in self.members]}
    self._checkpointer.save(self.step, self.state, self._streams, meta)

  def evaluate(self) -> list[dict[str, float]]:
    """Held-out metrics of every member, and what it scores on the tasks."""
    out = heldout.evaluate_members(
      self.config, self.engine, self.state, len(self.members)
    )
    for i, member in enumerate(self.members if self._tasks else ()):
      weights = self.engine.weights(self.state, i)
      program = self.engine.program
      numbers, _ = runner.run(member.config, self._tasks, program, weights)
      out[i] |= runner.rates(numbers)
    self._clock = time.monotonic()  # evaluation is no training time
    return out

  def close(self) -> None:
    """Waits for the saves in flight; raises if one of them failed."""
    for member in self.members:
      member.close()
    self._checkpointer.close()


def _engine(configs, member_streams, method) -> population.Engine:
  key = configure.program_key(configs[0])
  if method == 'single':
    devices = sharding.devices_for(key.mesh)
    return population.Single(configs[0], program_lib.build(key, devices))
  # The program of one member alone draws it and reports on it.
  one = program_lib.build(key, (jax.devices()[0],))
  make = population.Spread if method == 'map' else population.Batched
  return make(configs, one, member_streams)


def _loop(run: Run, bar: progress.Progress, preemption: Preemption) -> None:
  """Steps to the end, saving on schedule, at the end and on SIGTERM."""
  config, vote = run.config, distributed.Vote()
  while run.step < config.train.steps:
    logged = run.advance()
    stop = vote.stop(preemption.asked, run.crcs[0])
    last = run.step == config.train.steps
    scheduled = run.step % config.checkpoint.every == 0
    evaluating = config.eval.every and run.step % config.eval.every == 0
    if last or scheduled or evaluating or stop:
      logged = run.flush(run.evaluate() if evaluating and not last else None)
    if last or scheduled or stop:
      run.save()
    if logged:
      bar.update(*logged)
    if stop and not last:
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
  with distributed.together('the memory check'):
    devices = sharding.devices_for(config.mesh)
    configure.check_devices(config, len(devices), devices[0].platform)
    plan.check_fits(config)
  with distributed.own_folder(cell) as own:
    (result,) = train_together([config], [own], cell, 'single')
  if isinstance(result, Exception):
    raise result
  return result


def train_together(
  configs: Sequence[Config],
  cells: Sequence[pathlib.Path],
  folder: pathlib.Path,
  method: str,
) -> list[dict | Exception]:
  """Trains members of one shape in one program.

  Args:
    configs: the members.
    cells: their folders.
    folder: where their common checkpoints lie.
    method: 'single', 'map' or 'vmap'.

  Returns:
    For every member the content of its results.json, or why it failed.

  Raises:
    As `train`, for what concerns all members.
  """
  attempts = [
    provenance.start(cell / 'run.json', configure.config_hash(config))
    for config, cell in zip(configs, cells, strict=True)
  ]
  reasons = ['error'] * len(cells)
  try:
    with Preemption() as preemption:
      results = _train(configs, cells, folder, method, preemption)
    reasons = [
      f'NonFiniteLoss: {r}' if isinstance(r, Exception) else 'done'
      for r in results
    ]
    return results
  except Preempted:
    reasons = ['preempted'] * len(cells)
    raise
  except Exception as error:
    reasons = [f'{type(error).__name__}: {error}'] * len(cells)
    raise
  finally:
    for cell, attempt, reason in zip(cells, attempts, reasons, strict=True):
      provenance.finish(cell / 'run.json', attempt, reason)


def _train(configs, cells, folder, method, preemption):
  began = time.monotonic()
  steps = configs[0].train.steps
  with contextlib.closing(Run(configs, cells, folder, method)) as run:
    resumed_at = run.step
    label = cells[0].name if len(cells) == 1 else f'{len(cells)} cells'
    with contextlib.closing(progress.Progress(label, steps, run.step)) as bar:
      _loop(run, bar, preemption)
    evaluated = run.evaluate()
  # Closed: the final save is on disk, or its error has been raised.
  timing = {
    'seconds': time.monotonic() - began,
    'steps_timed': run.step - resumed_at,
    'members': len(cells),
  }
  # A kill between two of these leaves a group partly done; the next call
  # comes back here and writes what is missing.
  return [
    member.failure or member.finish(metrics, timing)
    for member, metrics in zip(run.members, evaluated, strict=True)
  ]


def evaluate_cell(config: Config, cell: pathlib.Path) -> dict:
  """Evaluates the newest checkpoint of a cell: held-out loss, then tasks.

  Returns:
    The content of eval.json, which it writes; eval_items.json gets what the
    model said of every item of the tasks.

  Raises:
    ConfigError: the cell has no complete checkpoint, or a task cannot be had.
  """
  folder, member, steps = trained.checkpoints(cell)
  heldout.check_vocabulary(config)
  tasks = runner.load(config)
  engine = _engine([config], [0], 'single')
  if member is None:
    state = checkpoint.load_state(folder, steps[-1], engine.abstract_state)
    params, moe_state = state.params, state.moe_state
  else:
    params, moe_state = jax.device_put(
      checkpoint.load_model(folder, steps[-1], member)
    )
    state = engine.abstract_state.replace(params=params, moe_state=moe_state)
  (metrics,) = heldout.evaluate_members(config, engine, state, 1)
  found = {'step': steps[-1], 'metrics': metrics}
  lines: dict[str, list[dict]] = {}
  if tasks:
    found['tasks'], lines = runner.run(
      config, tasks, engine.program, (params, moe_state)
    )
  with distributed.own_folder(cell) as own:
    files.write_json(own / 'eval.json', found)
    if lines:
      files.write_json(own / 'eval_items.json', lines)
  return found

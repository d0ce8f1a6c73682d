"""Whole runs: resume to the same bits, preemption, failures, results."""

import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest

from gamma_jax import checkpoint, configure, metric_writer, trainer
from gamma_jax.config import (
  CheckpointConfig,
  Config,
  DataConfig,
  EvalConfig,
  InitConfig,
  LogConfig,
  MeshConfig,
  ModelConfig,
  OptConfig,
  TrainConfig,
)
from gamma_jax.errors import ConfigError, NonFiniteLoss, Preempted

# Numbers of a line that a rerun must reproduce; the rest is time.
TIMED = ('perf/tokens_per_second', 'perf/model_flops_per_second')


@pytest.fixture(scope='module')
def config(tmp_path_factory):
  """A run of 40 steps on the committed sample, one device's worth of work."""
  return Config(
    model=ModelConfig(D=16, F=32, L=2, N=2, K=1, H=8, V=4096, mlp='gelu'),
    opt=OptConfig(warmup_steps=5),
    train=TrainConfig(steps=40, batch_size=8, seq_len=32, loss_chunk=64),
    data=DataConfig(dir=str(tmp_path_factory.mktemp('data'))),
    eval=EvalConfig(documents=8),
    checkpoint=CheckpointConfig(every=10),
    log=LogConfig(mechanics=0),  # mechanics_test.py
    mesh=MeshConfig(data=8),
  )


def lines(cell):
  rows = metric_writer.read_metrics(cell / 'metrics.jsonl')
  return [{k: v for k, v in r.items() if k not in TIMED} for r in rows]


def final_params(cell):
  step, params = checkpoint.load_params(cell / 'checkpoints')
  return step, jax.tree.map(np.asarray, params)


def assert_same_bits(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.fixture(scope='module')
def straight(config, tmp_path_factory):
  """The undisturbed run every other one is compared with."""
  cell = tmp_path_factory.mktemp('straight') / 'cell'
  return cell, trainer.train(config, cell)


class Crash(Exception):
  """Stands for a kill: nothing after it runs, not even a save."""


@pytest.mark.parametrize('crash_at', [1, 17, 20, 40])
def test_a_killed_run_resumes_to_the_same_bits(
  config, straight, tmp_path, monkeypatch, crash_at
):
  cell = tmp_path / 'cell'
  advance = trainer.Run.advance

  def dies(run):
    out = advance(run)
    if run.step == crash_at:
      raise Crash
    return out

  monkeypatch.setattr(trainer.Run, 'advance', dies)
  with pytest.raises(Crash):
    trainer.train(config, cell)
  monkeypatch.setattr(trainer.Run, 'advance', advance)
  results = trainer.train(config, cell)
  assert lines(cell) == lines(straight[0])
  assert_same_bits(final_params(cell)[1], final_params(straight[0])[1])
  assert results['metrics'] == straight[1]['metrics']
  resumed = (crash_at - 1) // 10 * 10
  assert results['timing']['steps_timed'] == 40 - resumed


def test_every_step_is_logged_once_and_tokens_are_counted(straight):
  rows = lines(straight[0])
  assert [r['step'] for r in rows] == list(range(1, 41))
  seen = [r['train/tokens_seen'] for r in rows]
  assert all(a < b for a, b in zip([0, *seen], seen))
  # Documents end inside rows, so a few labels of 8 * 32 are not asked.
  assert 0.9 * 40 * 256 < seen[-1] <= 40 * 256
  assert straight[1]['metrics']['train/tokens_seen'] == seen[-1]


def test_held_out_loss_falls_below_that_of_the_uniform_prediction(straight):
  metrics = straight[1]['metrics']
  assert metrics['heldout/loss'] < np.log(4096)
  assert metrics['heldout/loss_stderr'] > 0
  parts = [metrics[f'heldout/tokens/{s}'] for s in ('en', 'zh')]
  assert sum(parts) == metrics['heldout/tokens']


def test_the_last_step_is_saved_whatever_the_period(config, tmp_path):
  short = dataclasses.replace(
    config, train=dataclasses.replace(config.train, steps=13)
  )
  trainer.train(short, tmp_path / 'cell')
  assert checkpoint.complete_steps(tmp_path / 'cell/checkpoints') == [10, 13]


def test_sigterm_saves_and_the_next_call_goes_on(
  config, straight, tmp_path, monkeypatch
):
  cell = tmp_path / 'cell'
  advance = trainer.Run.advance

  def terminated(run):
    if run.step == 22:
      os.kill(os.getpid(), signal.SIGTERM)
    return advance(run)

  monkeypatch.setattr(trainer.Run, 'advance', terminated)
  with pytest.raises(Preempted, match='step 23'):
    trainer.train(config, cell)
  assert checkpoint.complete_steps(cell / 'checkpoints')[-1] == 23
  monkeypatch.setattr(trainer.Run, 'advance', advance)
  trainer.train(config, cell)
  assert lines(cell) == lines(straight[0])
  attempts = json.loads((cell / 'run.json').read_text())['attempts']
  assert [a['exit'] for a in attempts] == ['preempted', 'done']


def test_resume_takes_the_newest_complete_checkpoint(
  config, straight, tmp_path, monkeypatch, caplog
):
  cell = tmp_path / 'cell'
  advance = trainer.Run.advance

  def dies(run):
    out = advance(run)
    if run.step == 38:
      raise Crash
    return out

  monkeypatch.setattr(trainer.Run, 'advance', dies)
  with pytest.raises(Crash):
    trainer.train(config, cell)
  monkeypatch.setattr(trainer.Run, 'advance', advance)
  steps = cell / 'checkpoints'
  assert checkpoint.complete_steps(steps) == [20, 30]
  (steps / '30' / '_CHECKPOINT_METADATA').unlink()  # the save was cut off
  (steps / '35.orbax-checkpoint-tmp').mkdir()
  results = trainer.train(config, cell)
  assert results['timing']['steps_timed'] == 20
  assert 'incomplete' in caplog.text
  assert lines(cell) == lines(straight[0])


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(
  config, tmp_path
):
  hot = dataclasses.replace(
    config, opt=dataclasses.replace(config.opt, lr=1e30, clip=0.0)
  )
  with pytest.raises(NonFiniteLoss, match=r'step \d+: loss'):
    trainer.train(hot, tmp_path / 'cell')
  assert not (tmp_path / 'cell/results.json').exists()
  attempts = json.loads((tmp_path / 'cell/run.json').read_text())['attempts']
  assert 'NonFiniteLoss' in attempts[0]['exit']


def test_arms_of_one_seed_see_the_same_batches(config, straight, tmp_path):
  other = dataclasses.replace(config, init=InitConfig(gamma=0.5))
  trainer.train(other, tmp_path / 'cell')

  def crcs(cell):
    return [r['data/batch_crc32'] for r in lines(cell)]

  assert crcs(tmp_path / 'cell') == crcs(straight[0])
  assert len(set(crcs(straight[0]))) == 40


def test_evaluation_in_training_does_not_change_the_run(
  config, straight, tmp_path
):
  often = dataclasses.replace(config, eval=EvalConfig(every=15, documents=8))
  results = trainer.train(often, tmp_path / 'cell')
  rows = lines(tmp_path / 'cell')
  assert [r['step'] for r in rows if 'heldout/loss' in r] == [15, 30]
  plain = [
    {k: v for k, v in r.items() if not k.startswith('heldout')} for r in rows
  ]
  assert plain == lines(straight[0])
  assert results['metrics'] == straight[1]['metrics']


def test_step_zero_of_the_run_is_the_configured_init(config, tmp_path):
  # What a run reports it starts from is what it starts from.
  trainer.train(config, tmp_path / 'cell')
  report = json.loads((tmp_path / 'cell/init_report.json').read_text())
  q = next(m for m in report['matrices'] if m['path'].endswith('q/kernel'))
  assert q['std_asked'] == pytest.approx(1 / 16)
  assert q['std_got'] == pytest.approx(1 / 16, rel=0.1)
  assert report['source'] == 'measured'


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(config, tmp_path):
  small = dataclasses.replace(
    config, model=dataclasses.replace(config.model, V=1000)
  )
  with pytest.raises(ConfigError, match='model.V=1000 is smaller'):
    trainer.train(small, tmp_path / 'cell')


def test_a_model_that_cannot_fit_is_refused_before_it_is_drawn(
  config, tmp_path
):
  big = dataclasses.replace(
    config,
    model=ModelConfig(D=8192, F=32768, L=80, N=64, K=8, H=128, V=100352),
  )
  with pytest.raises(ConfigError, match='GiB a device'):
    trainer.train(big, tmp_path / 'cell')


def test_batch_that_does_not_divide_is_refused(config, tmp_path):
  odd = dataclasses.replace(
    config, train=dataclasses.replace(config.train, batch_size=6)
  )
  with pytest.raises(ConfigError, match='batch_size'):
    trainer.train(odd, tmp_path / 'cell')
  assert configure.config_hash(odd) != configure.config_hash(config)

"""What is measured of weights and attention while a run trains."""

import csv
import dataclasses

import jax
import numpy as np
import pytest

from gamma_jax import (
  checkpoint,
  configure,
  files,
  mechanics,
  metric_writer,
  population,
  sharding,
  trainer,
)
from gamma_jax import program as program_lib
from gamma_jax.config import (
  CheckpointConfig,
  Config,
  DataConfig,
  EvalConfig,
  LogConfig,
  MeshConfig,
  ModelConfig,
  MoeConfig,
  OptConfig,
  TrainConfig,
)
from tests.matrices import reference_stable_rank

MEASURED = ('condense/', 'sink/', 'residual/')


@pytest.fixture(scope='module')
def config(tmp_path_factory):
  return Config(
    model=ModelConfig(D=16, F=32, L=2, N=2, K=1, H=8, V=4096, mlp='gelu'),
    opt=OptConfig(warmup_steps=2),
    train=TrainConfig(steps=6, batch_size=4, seq_len=32, loss_chunk=64),
    data=DataConfig(dir=str(tmp_path_factory.mktemp('data'))),
    eval=EvalConfig(documents=4),
    checkpoint=CheckpointConfig(every=3),
  )


@pytest.fixture(scope='module')
def cell(config, tmp_path_factory):
  folder = tmp_path_factory.mktemp('cell')
  trainer.train(config, folder)
  return folder


def lines(cell):
  rows = metric_writer.read_metrics(cell / 'metrics.jsonl')
  return {row['step']: row for row in rows}


def measured(line):
  return {k: v for k, v in line.items() if k.startswith(MEASURED)}


@pytest.mark.parametrize(
  ('per_decade', 'steps'),
  [
    (0, []),
    (1, [0, 1, 10, 100, 120]),
    (2, [0, 1, 3, 10, 32, 100, 120]),
    (3, [0, 1, 2, 5, 10, 22, 46, 100, 120]),
    (5, [0, 1, 2, 3, 4, 6, 10, 16, 25, 40, 63, 100, 120]),
  ],
)
def test_steps_are_log_spaced_and_hold_both_ends(per_decade, steps):
  due = [s for s in range(121) if mechanics.is_due(s, per_decade, 120)]
  assert due == steps


def test_weights_are_those_of_the_step(cell):
  rows = lines(cell)
  assert [s for s in rows if measured(rows[s])] == [0, 1, 2, 5, 6]
  step, params = checkpoint.load_params(cell / 'checkpoints')
  assert step == 6
  up = np.asarray(params['blocks']['mlp']['up']['kernel'], np.float64)
  assert up.shape == (2, 16, 32)
  for layer, kernel in enumerate(up):
    got = rows[6][f'condense/stable_rank/up/{layer}']
    assert got == pytest.approx(reference_stable_rank(kernel), rel=1e-4)
    norm = rows[6][f'condense/frobenius/up/{layer}']
    assert norm == pytest.approx(np.linalg.norm(kernel), rel=1e-5)
    start = rows[0][f'condense/frobenius/up/{layer}']
    ratio = rows[6][f'condense/frobenius_ratio/up/{layer}']
    assert ratio == pytest.approx(norm / start, rel=1e-6)
    assert ratio != 1.0


def test_what_is_known_before_training(cell):
  start = lines(cell)[0]
  # At gamma = 1 queries and keys are small: attention is uniform, gates half
  # open, and the branches shrink as they should.
  floor = start['sink/uniform_floor']
  assert 0 < floor < 1
  for layer in range(2):
    for head in range(2):
      share = start[f'sink/share/{layer}/{head}']
      assert share == pytest.approx(floor, rel=0.01)
    assert start[f'sink/entropy_share/{layer}'] == pytest.approx(1, abs=1e-3)
    assert start[f'sink/gate_mean/{layer}'] == pytest.approx(0.5, abs=0.01)
    assert start[f'sink/gate_closed/{layer}'] == 0
    assert start[f'sink/max_activation/{layer}'] >= 1
    assert 0 < start[f'residual/mlp/{layer}'] < 1
  random = start['condense/stable_rank_random/up']
  assert random == pytest.approx(16 * 32 / (16**0.5 + 32**0.5) ** 2)
  assert not any('frobenius_ratio' in name for name in start)


def test_the_run_is_the_same_without(config, cell, tmp_path):
  off = dataclasses.replace(config, log=LogConfig(mechanics=0))
  trainer.train(off, tmp_path)
  plain, rows = lines(tmp_path), lines(cell)
  assert 0 not in plain
  for step, line in plain.items():
    for name, value in line.items():
      if not name.startswith('perf/'):
        assert rows[step][name] == value


def measure_start(config):
  """Numbers of step 0, without a run."""
  devices = sharding.devices_for(config.mesh)
  program = program_lib.build(configure.program_key(config), devices)
  engine = population.Single(config, program)
  measures = mechanics.Mechanics(engine, [config])
  (values,) = measures.measure(engine.init(), 0)
  return measures.line(values)


@pytest.mark.slow
def test_experts_and_headwise_gates_are_measured(config):
  moe = MoeConfig(experts=4, top_k=2, F=8, block=8)
  net = dataclasses.replace(config.model, moe=moe, gate='headwise')
  line = measure_start(dataclasses.replace(config, model=net))
  for name in (
    'condense/stable_rank/expert_up/1',
    'condense/stable_rank/router/0',
    'sink/gate_mean/1',
    'residual/mlp/1',
  ):
    assert np.isfinite(line[name])


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason='needs 8 virtual devices')
def test_many_devices_measure_the_same(config, cell):
  mesh = MeshConfig(data=2, fsdp=4)
  many = measure_start(dataclasses.replace(config, mesh=mesh))
  one = measured(lines(cell)[0])
  assert set(one) == set(many)
  for name, value in one.items():
    assert many[name] == pytest.approx(value, rel=2e-3, abs=1e-6), name


def test_checkpoints_alone_tell_the_same(config, cell, tmp_path):
  from gamma_jax import condense

  files.write_json(cell / 'config.json', configure.to_dict(config))
  assert condense.main([str(cell / 'checkpoints'), f'--out={tmp_path}']) == 0
  text = (tmp_path / 'condensation.csv').read_text()
  table = list(csv.DictReader(text.splitlines()))
  assert {row['step'] for row in table} == {'3', '6'}
  (row,) = [
    r
    for r in table
    if (r['step'], r['matrix'], r['layer']) == ('6', 'down', '1')
  ]
  line = lines(cell)[6]
  for measure in ('stable_rank', 'mean_abs_cosine', 'effective_rank'):
    logged = line[f'condense/{measure}/down/1']
    assert float(row[measure]) == pytest.approx(logged, rel=1e-4)
  assert (row['d_out'], row['d_in'], row['expert']) == ('16', '32', '')
  pictures = {path.name for path in tmp_path.glob('*.png')}
  assert pictures == {'trajectories.png', 'cosines-1.png'}
  # What is there is not written over.
  assert condense.main([str(cell), f'--out={tmp_path}']) == 2


def test_condense_says_what_is_no_cell(tmp_path, capsys):
  from gamma_jax import condense

  assert condense.main([str(tmp_path), '--out', str(tmp_path / 'o')]) == 2
  assert 'no complete checkpoint' in capsys.readouterr().err

"""Many cells in one program: the same bits as alone, and the same isolation."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from gamma_jax import (
  checkpoint,
  grouping,
  metric_writer,
  streams,
  sweep,
  train_step,
  trained,
  trainer,
)
from gamma_jax.config import (
  CheckpointConfig,
  Config,
  DataConfig,
  EvalConfig,
  MeshConfig,
  ModelConfig,
  OptConfig,
  SweepConfig,
  TrainConfig,
)
from gamma_jax.errors import NonFiniteLoss

TIMED = ('perf/tokens_per_second', 'perf/model_flops_per_second')


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  return Config(
    model=ModelConfig(D=16, F=32, L=2, N=2, K=1, H=8, V=4096, mlp='gelu'),
    opt=OptConfig(warmup_steps=2),
    train=TrainConfig(steps=12, batch_size=4, seq_len=32, loss_chunk=64),
    data=DataConfig(dir=str(tmp_path_factory.mktemp('data'))),
    eval=EvalConfig(every=8, documents=6),
    checkpoint=CheckpointConfig(every=5),
  )


def grid(base, *overrides):
  def add_all(add):
    for o in overrides:
      add(**o)

  return sweep.expand(base, add_all)


@pytest.fixture(scope='module')
def cells(base):
  return grid(
    base,
    {'init.gamma': 0.5, 'seed': 0},
    {'init.gamma': 1.0, 'seed': 1},
    {'init.rule': 'xavier', 'seed': 0},
    {'opt.lr': 1e-3, 'seed': 0},
    {'model.norm_eps': 1e-5, 'seed': 0},
  )


def run_together(cells, workdir, method='map'):
  return trainer.train_together(
    [c.config for c in cells],
    [workdir / c.id for c in cells],
    workdir / 'group',
    method,
  )


def lines(cell):
  rows = metric_writer.read_metrics(cell / 'metrics.jsonl')
  return [{k: v for k, v in r.items() if k not in TIMED} for r in rows]


@pytest.fixture(scope='module')
def alone(cells, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('alone')
  return workdir, [trainer.train(c.config, workdir / c.id) for c in cells]


def test_members_are_bitwise_equal_to_single_runs(cells, alone, tmp_path):
  workdir, single = alone
  together = run_together(cells, tmp_path)
  for cell, a, b in zip(cells, single, together, strict=True):
    assert a['metrics'] == b['metrics'], cell.id
    assert lines(workdir / cell.id) == lines(tmp_path / cell.id), cell.id
  _, params = checkpoint.load_params(tmp_path / 'group/checkpoints')
  for cell, got in zip(cells, params, strict=True):
    _, want = checkpoint.load_params(workdir / cell.id / 'checkpoints')
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
      np.testing.assert_array_equal(x, y)


def test_vmap_stays_close_to_single_runs(cells, alone, tmp_path):
  together = run_together(cells, tmp_path, 'vmap')
  for a, b in zip(alone[1], together, strict=True):
    want, got = (r['metrics']['heldout/loss'] for r in (a, b))
    assert got == pytest.approx(want, rel=1e-4)


def test_a_killed_group_resumes_to_the_same_bits(
  cells, alone, tmp_path, monkeypatch
):
  class Crash(Exception):
    pass

  advance = trainer.Run.advance

  def dies(run):
    out = advance(run)
    if run.step == 7:
      raise Crash
    return out

  monkeypatch.setattr(trainer.Run, 'advance', dies)
  with pytest.raises(Crash):
    run_together(cells, tmp_path)
  monkeypatch.setattr(trainer.Run, 'advance', advance)
  results = run_together(cells, tmp_path)
  assert results[0]['timing']['steps_timed'] == 7  # from the save of step 5
  for cell, a, b in zip(cells, alone[1], results, strict=True):
    assert a['metrics'] == b['metrics']
    assert lines(tmp_path / cell.id) == lines(alone[0] / cell.id)


def test_a_member_that_fails_is_frozen_and_the_others_go_on(
  base, cells, alone, tmp_path
):
  hot = grid(base, {'opt.lr': 1e30})
  results = run_together([cells[0], *hot, cells[1]], tmp_path)
  assert isinstance(results[1], NonFiniteLoss)
  assert 'step ' in str(results[1])
  assert [results[i]['metrics'] for i in (0, 2)] == [
    alone[1][i]['metrics'] for i in (0, 1)
  ]
  assert not (tmp_path / hot[0].id / 'results.json').exists()
  _, params = checkpoint.load_params(tmp_path / 'group/checkpoints')
  for x in jax.tree.leaves(params):
    assert np.all(np.isfinite(x))  # the last good state was kept
  run = json.loads((tmp_path / hot[0].id / 'run.json').read_text())
  assert 'NonFiniteLoss' in run['attempts'][-1]['exit']


def test_members_with_one_data_seed_share_a_stream(cells):
  configs = [c.config for c in cells]
  assert streams.Streams(configs).member == [0, 1, 0, 0, 0]
  same = [
    dataclasses.replace(c, data=dataclasses.replace(c.data, seed=7))
    for c in configs
  ]
  assert streams.Streams(same).member == [0] * 5


def test_one_compile_for_any_number_of_groups(base, monkeypatch, tmp_path):
  wide = dataclasses.replace(base, model=dataclasses.replace(base.model, D=24))
  traced = []
  original = train_step.train_step

  def counted(*args):
    traced.append(1)
    return original(*args)

  monkeypatch.setattr(train_step, 'train_step', counted)
  for i, pair in enumerate([(0.5, 0.75), (1.0, 1.25)]):
    group = grid(wide, *({'init.gamma': g} for g in pair))
    run_together(group, tmp_path / str(i))
  assert len(traced) == 1


# --- Which cells go together -------------------------------------------------


def split(cells, workdir, todo=None):
  groups = grouping.Populations(workdir).split(cells, todo or cells)
  return [[c.id for c in group] for group in groups]


def test_cells_of_one_shape_go_together(base, tmp_path):
  cells = grid(
    base,
    {'init.gamma': 0.5},
    {'model.D': 32},
    {'init.gamma': 1.0},
    {'train.steps': 20},
    {'opt.lr': 1e-4},
  )
  assert split(cells, tmp_path) == [
    ['gamma=0.5', 'gamma=1.0', 'lr=0.0001'],
    ['D=32'],
    ['steps=20'],
  ]


def test_off_or_a_mesh_keeps_cells_apart(base, tmp_path):
  pair = ({'init.gamma': 0.5}, {'init.gamma': 1.0})
  off = dataclasses.replace(base, sweep=SweepConfig(population='off'))
  assert split(grid(off, *pair), tmp_path) == [['gamma=0.5'], ['gamma=1.0']]
  mesh = dataclasses.replace(base, mesh=MeshConfig(data=1, fsdp=-1))
  assert split(grid(mesh, *pair), tmp_path) == [['gamma=0.5'], ['gamma=1.0']]


def test_a_cell_that_failed_or_trains_alone_goes_alone(base, tmp_path):
  cells = grid(base, *({'init.gamma': g} for g in (0.5, 0.75, 1.0)))
  (tmp_path / 'gamma=0.75').mkdir()
  (tmp_path / 'gamma=0.75' / 'error.txt').touch()
  assert split(cells, tmp_path) == [
    ['gamma=0.5'],
    ['gamma=0.75'],
    ['gamma=1.0'],
  ]


def test_a_group_half_written_comes_back_as_the_group(base, tmp_path):
  cells = grid(base, *({'init.gamma': g} for g in (0.5, 0.75, 1.0)))
  everything = [[c.id for c in cells]]
  assert split(cells, tmp_path, cells[1:]) == [['gamma=0.75'], ['gamma=1.0']]
  (tmp_path / grouping.FOLDER / grouping._name(cells)).mkdir(parents=True)
  assert split(cells, tmp_path, cells[1:]) == everything


def test_a_group_too_large_for_memory_is_cut(base, tmp_path, monkeypatch):
  cells = grid(base, *({'seed': s} for s in range(20)))
  monkeypatch.setattr(grouping.plan, 'total_memory', lambda: 1)
  per_device = jax.local_device_count()
  sizes = [len(g) for g in split(cells, tmp_path)]
  assert sizes == [per_device] * (20 // per_device) + [20 % per_device]


def test_a_grid_runs_as_populations_and_reruns_nothing(base, cells, tmp_path):
  def run():
    return sweep.run_sweep(
      cells, tmp_path, trainer.train, '', grouping.Populations(tmp_path)
    )

  assert run() == 0
  assert all(sweep.is_done(tmp_path / c.id) for c in cells)
  before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*.json*')}
  assert run() == 0
  after = {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*.json*')}
  changed = [p.name for p in before if before[p] != after[p]]
  assert changed == ['sweep.json']
  assert_members_are_found(cells, tmp_path)


def assert_members_are_found(cells, workdir):
  """With and, as in older folders, without a list of the members."""
  (folder,) = (workdir / grouping.FOLDER).iterdir()
  want = json.loads((workdir / cells[3].id / 'results.json').read_text())
  found = trainer.evaluate_cell(cells[3].config, workdir / cells[3].id)
  heldout = found['metrics']
  assert heldout == {k: want['metrics'][k] for k in heldout}
  members = [trained.checkpoints(workdir / c.id) for c in cells]
  assert [m for _, m, _ in members] == list(range(len(cells)))
  (folder / 'members.json').unlink()
  assert members == [trained.checkpoints(workdir / c.id) for c in cells]

"""A cell's model is found wherever it lies, and nothing else is."""

import json

import numpy as np
import pytest

from gamma_jax import checkpoint, configure, files, trained
from gamma_jax.config import CheckpointConfig, Config
from gamma_jax.errors import ConfigError
from gamma_jax.train_step import TrainState

IDS = ['gamma=0.5', 'gamma=0.75', 'gamma=1.0']


class NoData:
  """Stands for the data of a run."""

  def get_state(self):
    return []


def state(value, rows=()):
  """A state without a model around it; all numbers say `value`."""
  full = np.full((*rows, 2, 3), value, np.float32)
  if rows:
    full += np.arange(rows[0], dtype=np.float32)[:, None, None]
  return TrainState(
    step=np.int32(1),
    alive=np.bool_(True),
    params={'embed': {'embedding': full}},
    opt_state=(full,),
    moe_state={'bias': -full},
  )


def save(folder, step, what):
  saver = checkpoint.Checkpointer(folder / 'checkpoints', CheckpointConfig())
  saver.save(step, what, NoData(), {})
  saver.close()


def make_cells(workdir):
  for name in IDS:
    config = configure.to_dict(Config())
    files.write_json(workdir / name / 'config.json', config)
  rows = [{'id': name} for name in ['other', *IDS]]
  files.write_json(workdir / 'sweep.json', {'cells': rows})
  return workdir / trained.POPULATIONS / trained.population_name(IDS)


def values(one):
  """The one number that the params of a cell are full of."""
  (number,) = np.unique(one.params['embed']['embedding'])
  np.testing.assert_array_equal(
    one.moe_state['bias'], -one.params['embed']['embedding']
  )
  assert isinstance(one.params['embed']['embedding'], np.ndarray)
  return number


@pytest.mark.parametrize('method', ['map', 'vmap'])
def test_a_member_of_a_population_is_found(tmp_path, method):
  folder = make_cells(tmp_path)
  # 'vmap' may have more rows than members.
  states = tuple(state(7 + i) for i in range(3))
  save(folder, 5, states if method == 'map' else state(7, rows=(4,)))
  for how in ('by name', 'by list'):
    found = [trained.load(tmp_path / name) for name in IDS]
    assert [values(one) for one in found] == [7, 8, 9], how
    assert {one.step for one in found} == {5}
    trained.write_members(folder, IDS)
  listed = json.loads((folder / 'members.json').read_text())
  assert listed == IDS


def test_its_own_checkpoint_goes_first_and_a_step_can_be_named(tmp_path):
  save(make_cells(tmp_path), 9, tuple(state(7 + i) for i in range(3)))
  cell = tmp_path / IDS[1]
  save(cell, 3, state(1))
  save(cell, 4, state(2))
  assert values(trained.load(cell)) == 2
  assert values(trained.load(cell, 3)) == 1
  with pytest.raises(
    ConfigError, match='no complete checkpoint 9; it has 3, 4'
  ):
    trained.load(cell, 9)


def test_what_is_no_trained_cell_is_refused(tmp_path):
  folder = make_cells(tmp_path)
  (folder.parent / '2-somebody').mkdir(parents=True)
  with pytest.raises(ConfigError, match='no complete checkpoint .*train it'):
    trained.load(tmp_path / IDS[0])
  with pytest.raises(ConfigError, match='not the folder of a cell'):
    trained.load(tmp_path)
  (tmp_path / IDS[0] / 'config.json').write_text('{"seed": "x"}')
  with pytest.raises(ConfigError, match='config.json cannot be read: seed'):
    trained.load(tmp_path / IDS[0])

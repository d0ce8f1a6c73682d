"""Grids: ids, refusals, and failures that stay with their cell."""

import dataclasses
import json
import logging

import pytest

from gamma_jax import configure, files, results, sweep
from gamma_jax.config import Config
from gamma_jax.errors import ConfigError, Preempted


def grid(add):
  for seed in range(2):
    for gamma in (0.5, 1.0):
      add({'init.gamma': gamma}, seed=seed)


def ids(cells):
  return [cell.id for cell in cells]


def cells_of(*values, **changes):
  base = configure.resolve(changes)
  return sweep.expand(base, lambda add: [add(seed=v) for v in values])


class Trainer:
  """Stands for trainer.train: remembers its calls, fails where told."""

  def __init__(self, **failures):
    self.calls = []
    self.failures = {k.replace('_', '='): v for k, v in failures.items()}

  def __call__(self, config, folder):
    self.calls.append(folder.name)
    assert configure.from_dict(files.read_json(folder / 'config.json')) == (
      config
    )
    if folder.name in self.failures:
      raise self.failures[folder.name]
    metrics = {'heldout/loss': float(config.seed)}
    done = {'status': 'done', 'steps': 1, 'metrics': metrics}
    files.write_json(folder / 'results.json', done)


# Expanding.


def test_a_config_without_a_sweep_is_one_cell():
  (cell,) = sweep.expand(Config())
  assert (cell.id, cell.config, cell.overrides) == ('run', Config(), {})


def test_cells_come_in_order_with_their_overrides():
  cells = sweep.expand(Config(), grid)
  assert ids(cells) == [
    'gamma=0.5,seed=0',
    'gamma=1.0,seed=0',
    'gamma=0.5,seed=1',
    'gamma=1.0,seed=1',
  ]
  assert cells[2].overrides == {'init.gamma': 0.5, 'seed': 1}
  assert cells[2].config.init.gamma == 0.5
  assert cells[2].config.seed == 1


def test_a_bundle_is_named_by_its_first_entry():
  def one(add):
    size = {'size': '0.1B', 'model.D': 32, 'model.L': 2}
    add(size, {'init.gamma': 1}, seed=0)

  (cell,) = sweep.expand(Config(), one)
  assert cell.id == 'size=0.1B,gamma=1.0,seed=0'
  assert cell.overrides == {'size': '0.1B', 'init.gamma': 1.0, 'seed': 0}
  assert (cell.config.model.D, cell.config.model.L) == (32, 2)


@pytest.mark.parametrize(
  ('path', 'name'),
  [
    ('init.gamma', 'gamma'),
    ('seed', 'seed'),
    ('data.seed', 'data.seed'),
    ('opt.lr', 'lr'),
    ('train.batch_size', 'train.batch_size'),
    ('init.overrides.head', 'gamma_head'),
    ('init.overrides.mlp', 'gamma_mlp'),
    ('model.mlp', 'mlp'),
    ('model.gate', 'gate'),
    ('mesh.data', 'mesh.data'),
    ('size', 'size'),
  ],
)
def test_short_names(path, name):
  assert sweep.short_name(path) == name


def test_short_names_are_all_different():
  names = [sweep.short_name(path) for path in configure.fields()]
  assert len(set(names)) == len(names)


@pytest.mark.parametrize(
  ('override', 'cell_id'),
  [
    ({'model.norm_eps': 1e-12}, 'norm_eps=1e-12'),
    ({'model.tied': True}, 'tied=True'),
    ({'data.seed': None}, 'data.seed=None'),
    ({'data.source': 'jsonl:/a/../*.jsonl'}, 'source=jsonl-a-..-.jsonl'),
    ({'data.mixture': {'zh': 1, 'en': 0.5}}, 'mixture=en+0.5+zh+1.0'),
    ({'size': 'a,b=c d'}, 'size=a-b-c-d'),
  ],
)
def test_ids_are_safe_file_names(override, cell_id):
  (cell,) = sweep.expand(Config(), lambda add: add(override))
  assert cell.id == cell_id
  json.dumps(cell.overrides)


@pytest.mark.parametrize(
  ('calls', 'message'),
  [
    ([{'init.gama': 1.0}], 'cell gama=1.0: unknown key init.gama; did you mea'),
    ([{'init.gamma': 'x'}], 'cell gamma=x: init.gamma: expected a float'),
    ([{'init.gamma': -1.0}], 'cell gamma=-1.0: init.gamma=-1.0 must be'),
    ([{'init': {}}], 'init is a group'),
    ([{'init.gamma': 1.0}, {'init.gamma': 1}], 'cell gamma=1.0: added twice'),
    ([{'platform': 'cpu'}], 'platform is one for the whole grid'),
    ([{'sweep.fail_fast': True}], 'sweep.fail_fast is one for the whole grid'),
    ([{'size': 'x' * 300}], 'the id is too long'),
    ([{}], 'add.. takes dicts and keywords, got {}'),
    ([3], 'add.. takes dicts and keywords, got 3'),
    ([], 'the sweep of the config adds no cell'),
  ],
)
def test_bad_cells(calls, message):
  with pytest.raises(ConfigError, match=message) as caught:
    sweep.expand(Config(), lambda add: [add(call) for call in calls])
  assert '\n' not in str(caught.value)


def test_more_bad_cells():
  with pytest.raises(ConfigError, match='seed is given twice'):
    sweep.expand(Config(), lambda add: add({'size': 'a', 'seed': 1}, seed=1))
  with pytest.raises(ConfigError, match='add.. needs something that varies'):
    sweep.expand(Config(), lambda add: add())
  with pytest.raises(ConfigError, match='drop --config.seed'):
    sweep.expand(Config(), lambda add: add(seed=1), fixed=['seed'])
  bad = configure.resolve({'train': {'steps': 1}})
  with pytest.raises(ConfigError, match='cell seed=1: opt.warmup_steps'):
    sweep.expand(bad, lambda add: add(seed=1))
  with pytest.raises(ConfigError, match='^opt.warmup_steps'):
    sweep.expand(bad)


def test_errors_of_the_config_file_are_not_hidden():
  with pytest.raises(ZeroDivisionError):
    sweep.expand(Config(), lambda add: add(seed=1 // 0))


def test_select():
  cells = sweep.expand(Config(), grid)
  assert ids(sweep.select(cells, 'seed=1')) == ids(cells)[2:]
  assert sweep.select(cells) == cells
  with pytest.raises(ConfigError, match="no cell id contains 'x'.*and 1 more"):
    sweep.select(cells, 'x')


# Running.


def test_a_grid_runs_and_is_listed(tmp_path):
  cells, train = sweep.expand(Config(), grid), Trainer()
  assert sweep.run_sweep(cells, tmp_path / 'new', train) == 0
  assert train.calls == ids(cells)
  rows = results.collect(tmp_path / 'new')
  assert [row.id for row in rows] == ids(cells)
  assert {row.status for row in rows} == {'done'}
  assert rows[1].overrides == {'init.gamma': 1.0, 'seed': 0}


def test_a_second_call_touches_nothing(tmp_path):
  cells = cells_of(0, 1)
  sweep.run_sweep(cells, tmp_path, Trainer())
  before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*.json')}
  train = Trainer()
  assert sweep.run_sweep(cells, tmp_path, train) == 0
  assert train.calls == []
  after = {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*.json')}
  del before[tmp_path / 'sweep.json'], after[tmp_path / 'sweep.json']
  assert after == before


def test_a_failure_stays_with_its_cell(tmp_path, caplog):
  cells = cells_of(0, 1, 2)
  train = Trainer(seed_1=MemoryError('out of\nmemory'))
  with caplog.at_level(logging.INFO):
    assert sweep.run_sweep(cells, tmp_path, train) == sweep.SOME_FAILED == 4
  assert train.calls == ['seed=0', 'seed=1', 'seed=2']
  errors = [r.message for r in caplog.records if r.levelname == 'ERROR']
  where = tmp_path / 'seed=1' / 'error.txt'
  assert errors == [f'error: seed=1: MemoryError: out of (see {where})']
  assert 'Traceback' in where.read_text()
  assert 'in __call__' in where.read_text()

  again = Trainer(seed_1=RuntimeError('still'))
  assert sweep.run_sweep(cells, tmp_path, again) == 4
  assert again.calls == ['seed=1']
  assert 'still' in where.read_text()

  again = Trainer()
  assert sweep.run_sweep(cells, tmp_path, again) == 0
  assert again.calls == ['seed=1']
  assert not where.exists()


def test_fail_fast_stops_at_the_first_failure(tmp_path):
  cells = cells_of(0, 1, 2, sweep={'fail_fast': True})
  train = Trainer(seed_1=RuntimeError('x'))
  assert sweep.run_sweep(cells, tmp_path, train) == 4
  assert train.calls == ['seed=0', 'seed=1']


def test_preemption_stops_the_grid(tmp_path):
  train = Trainer(seed_1=Preempted('saved'))
  assert sweep.run_sweep(cells_of(0, 1, 2), tmp_path, train) == 3
  assert train.calls == ['seed=0', 'seed=1']
  assert not (tmp_path / 'seed=1' / 'error.txt').exists()
  train = Trainer()
  assert sweep.run_sweep(cells_of(0, 1, 2), tmp_path, train) == 0
  assert train.calls == ['seed=1', 'seed=2']


def test_interrupt_propagates(tmp_path):
  train = Trainer(seed_0=KeyboardInterrupt())
  with pytest.raises(KeyboardInterrupt):
    sweep.run_sweep(cells_of(0, 1), tmp_path, train)
  assert train.calls == ['seed=0']


def test_nothing_but_bad_input_is_exit_code_2(tmp_path, caplog):
  cells = cells_of(0, 1)
  bad = ConfigError('data.source: no file matches x')
  train = Trainer(seed_0=bad, seed_1=bad)
  assert sweep.run_sweep(cells, tmp_path, train) == 2
  assert caplog.messages[0] == 'error: seed=0: data.source: no file matches x'
  # With anything else it is a grid of which some cells failed.
  assert sweep.run_sweep(cells, tmp_path, Trainer(seed_0=bad)) == 4
  assert sweep.run_sweep(cells, tmp_path, Trainer(seed_0=bad)) == 2


def test_another_config_is_refused_before_any_cell_runs(tmp_path):
  sweep.run_sweep(cells_of(1), tmp_path, Trainer())
  listed = (tmp_path / 'sweep.json').read_text()
  other = cells_of(0, 1, opt={'lr': 1e-3, 'clip': 0.5, 'b1': 0.8, 'b2': 0.9})
  train = Trainer()
  with pytest.raises(ConfigError) as caught:
    sweep.run_sweep(other, tmp_path, train)
  assert str(caught.value) == (
    f'{tmp_path / "seed=1"} was made with another config: opt.lr (0.002, now '
    '0.001), opt.b1 (0.9, now 0.8), opt.b2 (0.95, now 0.9) and 1 more; use '
    'another --workdir'
  )
  assert train.calls == []
  assert (tmp_path / 'sweep.json').read_text() == listed
  # A cell that the call does not even select.
  with pytest.raises(ConfigError, match='another config'):
    sweep.run_sweep(other, tmp_path, train, only='seed=0')


def test_what_changes_no_number_may_change(tmp_path):
  sweep.run_sweep(cells_of(0), tmp_path, Trainer(seed_0=RuntimeError('x')))
  train = Trainer()
  other = cells_of(0, checkpoint={'every': 7}, mesh={'fsdp': 4})
  assert sweep.run_sweep(other, tmp_path, train) == 0
  assert train.calls == ['seed=0']
  config = files.read_json(tmp_path / 'seed=0' / 'config.json')
  assert config['checkpoint']['every'] == 7


def test_a_folder_of_unknown_origin_is_refused(tmp_path):
  folder = tmp_path / 'seed=0'
  folder.mkdir()
  (folder / '.config.json.1.tmp').touch()  # what a kill leaves
  assert sweep.run_sweep(cells_of(0), tmp_path, Trainer()) == 0
  (folder / 'config.json').unlink()
  with pytest.raises(ConfigError, match='results.json but no config.json'):
    sweep.run_sweep(cells_of(0), tmp_path, Trainer())


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    ('{"a', 'cannot be read'),
    ('[]', 'not a JSON object'),
    ('{"new_field": 1}', 'config.json: unknown key new_field'),
  ],
)
def test_a_broken_config_json(tmp_path, content, message):
  folder = tmp_path / 'seed=0'
  folder.mkdir()
  (folder / 'config.json').write_text(content)
  with pytest.raises(ConfigError, match=message) as caught:
    sweep.run_sweep(cells_of(0), tmp_path, Trainer())
  assert '\n' not in str(caught.value)


def test_a_workdir_that_cannot_be_written(tmp_path):
  (tmp_path / 'file').touch()
  with pytest.raises(ConfigError, match='cannot write to --workdir'):
    sweep.run_sweep(cells_of(0), tmp_path / 'file', Trainer())


def test_only_runs_a_part_but_lists_the_whole_grid(tmp_path):
  cells, train = sweep.expand(Config(), grid), Trainer()
  assert sweep.run_sweep(cells, tmp_path, train, only='gamma=1.0') == 0
  assert train.calls == ['gamma=1.0,seed=0', 'gamma=1.0,seed=1']
  rows = results.collect(tmp_path)
  assert [row.status for row in rows] == ['missing', 'done'] * 2


def test_a_grid_may_grow_and_forgets_only_what_never_ran(tmp_path):
  sweep.run_sweep(cells_of(5, 6), tmp_path, Trainer(), only='seed=5')
  train = Trainer()
  assert sweep.run_sweep(cells_of(4, 7), tmp_path, train) == 0
  assert train.calls == ['seed=4', 'seed=7']
  listed = [row.id for row in results.collect(tmp_path)]
  assert listed == ['seed=4', 'seed=7', 'seed=5']


def test_results_that_are_not_done_do_not_count(tmp_path):
  (cell,) = cells_of(0)
  sweep.run_sweep([cell], tmp_path, Trainer())
  files.write_json(tmp_path / 'seed=0' / 'results.json', {'status': 'failed'})
  train = Trainer()
  sweep.run_sweep([cell], tmp_path, train)
  assert train.calls == ['seed=0']


def test_cells_cannot_be_changed():
  (cell,) = cells_of(0)
  with pytest.raises(dataclasses.FrozenInstanceError):
    cell.id = 'x'

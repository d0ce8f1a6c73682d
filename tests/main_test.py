"""The command line: one line for each mistake, exit codes, modes.

Training itself is replaced; what it does is tested elsewhere.
"""

import logging
import subprocess
import sys
import types

import jax
import pytest

import gamma_jax
from gamma_jax import command_line, files, grouping, main, platforms
from gamma_jax.errors import ConfigError, Preempted

GRID = """
from configs import base, common

def get_config(arg=None):
  arguments = common.parse_arg(arg, width=16, seeds=2)
  config = base.get_config()
  config.model.D = arguments['width']
  return config

def sweep(add, arg=None):
  for seed in range(common.parse_arg(arg, width=16, seeds=2)['seeds']):
    for gamma in (0.5, 1.0):
      add({'init.gamma': gamma}, seed=seed)
"""


@pytest.fixture
def grid(tmp_path):
  path = tmp_path / 'grid.py'
  path.write_text(GRID)
  return path


@pytest.fixture
def trained(monkeypatch):
  """Replaces the trainer; gives the list of (config, folder) it was called
  with, and raises what `trained.failures` has for a cell."""
  calls = []

  def train(config, folder):
    calls.append((config, folder))
    if folder.name in fake.failures:
      raise fake.failures[folder.name]
    metrics = {'heldout/loss': 3.0 + config.init.gamma + config.seed / 10}
    done = {'status': 'done', 'steps': config.train.steps, 'metrics': metrics}
    files.write_json(folder / 'results.json', done)

  def train_together(configs, folders, common, method):
    results = []
    for config, folder in zip(configs, folders, strict=True):
      try:
        results.append(train(config, folder))
      except Preempted:
        raise
      except Exception as error:
        results.append(error)
    return results

  def evaluate_cell(config, folder):
    calls.append((config, folder))
    return {'step': 1, 'metrics': {}}

  fake = types.ModuleType('gamma_jax.trainer')
  fake.train, fake.evaluate_cell = train, evaluate_cell
  fake.train_together = train_together
  fake.calls, fake.failures = calls, {}
  monkeypatch.setitem(sys.modules, 'gamma_jax.trainer', fake)
  monkeypatch.setattr(gamma_jax, 'trainer', fake, raising=False)
  monkeypatch.setattr(grouping, 'trainer', fake)
  return fake


def call(*arguments):
  return main.main(['main', *map(str, arguments)])


def names(trained):
  return [folder.name for _, folder in trained.calls]


def error_of(capsys):
  out, err = capsys.readouterr()
  assert out == ''
  assert err.startswith('error: ')
  assert err.count('\n') == 1, err
  return err[len('error: ') : -1]


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ([], '--config is missing; for example --config=configs/sweep_tiny.py'),
    (['--config=GRID'], '--workdir is missing; --mode=train needs the folder'),
    (['--config=GRID', '--mode=eval'], '--workdir is missing'),
    (['--mode=report'], '--workdir is missing'),
    (['--config'], 'Missing value for flag --config'),
    (['--config=GRID', '--workdir'], 'Missing value for flag --workdir'),
    (['--config=GRID', '--wrkdir=x'], "'wrkdir'. Did you mean: workdir"),
    (['--config=GRID', '--workdir=x', 'y'], "unexpected argument 'y'"),
    (
      ['--config=GRID', '--mode=trian'],
      'flag --mode=trian: value should be one of <train|plan|report|eval>',
    ),
    (['--config.seed=1'], '--config.seed needs --config=FILE'),
    (
      ['--config=configs/sweep_tinny.py'],
      'there is no config file configs/sweep_tinny.py; did you mean '
      'configs/sweep_tiny.py?',
    ),
    (['--config=configs'], 'there is no config file configs'),
    (['--config=README.md'], 'README.md'),
    (['--config=GRID:with=3'], "grid.py: unknown config argument 'with'"),
    (['--config=GRID:seeds=x'], 'seeds=x is not of type int'),
    (['--config=GRID:width=15', '--config.model.H=15'], 'model.H=15 must be'),
    (['--config=GRID', '--config.init.gama=1'], 'did you mean init.gamma?'),
    (['--config=GRID', '--config.gamma=1'], 'did you mean init.gamma?'),
    (['--config=GRID', '--config.=1'], 'unknown key'),
    (['--config=GRID', '--config.init.gamma.x=1'], 'unknown key init.gamma.x'),
    (['--config=GRID', '--config.model=1'], 'model is a group; set one of'),
    (
      ['--config=GRID', '--config.train.steps=1e3'],
      '--config.train.steps=1e3 is not an int',
    ),
    (
      ['--config=GRID', '--config.opt.lr=abc'],
      '--config.opt.lr=abc is not a float',
    ),
    (['--config=GRID', '--config.model.tied=maybe'], 'is not a bool'),
    (['--config=GRID', '--config.data.seed=1.5'], 'is not an int'),
    (['--config=GRID', '--config.data.mixture=en'], 'a dict of part: weight'),
    (
      ['--config=GRID', "--config.data.mixture={'en': 'x'}"],
      "data.mixture.en: expected a float, got 'x'",
    ),
    (['--config=GRID', '--config.opt.lr'], 'Missing value'),
    (
      ['--config=GRID', '--config.opt.lr=nan', '--workdir=x'],
      'cell gamma=0.5,seed=0: opt.lr=nan must be a number at least 0',
    ),
    (
      ['--config=GRID', '--config.init.gamma=2', '--workdir=x'],
      'sets init.gamma itself; drop --config.init.gamma',
    ),
    (
      ['--config=GRID', '--workdir=x', '--only=gama'],
      "no cell id contains 'gama'",
    ),
    (
      ['--config=GRID', '--workdir=x', '--config.platform=tpu'],
      "platform='tpu' is not what JAX runs on here (cpu: 8 x cpu)",
    ),
    (
      ['--config=GRID', '--workdir=x', '--config.platform=cuda'],
      "platform='cuda' is not one of",
    ),
    (['--workdir=nowhere', '--mode=report'], 'nowhere/sweep.json does not ex'),
  ],
)
def test_every_mistake_is_one_line(arguments, message, grid, trained, capsys):
  arguments = [a.replace('GRID', str(grid)) for a in arguments]
  said = any(a.startswith(('--workdir', '--mode')) for a in arguments)
  if not said and 'is missing' not in message:
    arguments.insert(0, '--workdir=x')
  assert call(*arguments) == 2
  assert message in error_of(capsys)
  assert trained.calls == []


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('x = 1', 'has no function get_config'),
    ('def get_config(): return 1', 'get_config must return a ConfigDict'),
    ('def get_config(:', 'bad.py: SyntaxError: invalid syntax'),
    (
      'import nothing_here',
      "bad.py:1: ModuleNotFoundError: No module named 'n",
    ),
    ('x = 1\nx.y', 'bad.py:2: AttributeError'),
    (
      'from configs import base\n'
      'def get_config():\n  c = base.get_config()\n  c.train.steps = 1e3',
      'bad.py:4: TypeError',
    ),
    (
      'from configs import base\n'
      'def get_config():\n  c = base.get_config()\n  c.lr = 1.0\n  return c',
      'unknown key lr; did you mean opt.lr?',
    ),
    (
      'from configs.base import get_config\nsweep = 1',
      'bad.py: sweep must be a function',
    ),
    (
      'from configs.base import get_config\n'
      'def sweep(add):\n  add(seed=1)\n  add(seed=1)',
      'cell seed=1: added twice',
    ),
    (
      'from configs.base import get_config\ndef sweep(add):\n  add(sed=1)',
      'cell sed=1: unknown key sed; did you mean seed?',
    ),
    (
      'from configs.base import get_config\ndef sweep(add):\n  1 / 0',
      'bad.py:3: ZeroDivisionError: division by zero',
    ),
  ],
)
def test_a_broken_config_file_is_one_line(text, message, tmp_path, capsys):
  path = tmp_path / 'bad.py'
  path.write_text(text)
  assert call(f'--config={path}', f'--workdir={tmp_path}') == 2
  assert message in error_of(capsys)


def test_a_grid_is_trained_and_reported(grid, trained, tmp_path, capsys):
  workdir = tmp_path / 'new' / 'runs'
  arguments = [f'--config={grid}:seeds=1', f'--workdir={workdir}']
  # All the ways that absl has to write a flag.
  arguments += ['--config.train.steps', '60', '--config.model.tied']
  arguments += ['--noconfig.model.scan', "--config.data.mixture={'en': 1}"]
  assert call(*arguments) == 0
  assert names(trained) == ['gamma=0.5,seed=0', 'gamma=1.0,seed=0']
  config = trained.calls[0][0]
  assert config.model.D == 16
  assert config.train.steps == 60
  assert config.model.tied and not config.model.scan
  assert config.data.mixture == (('en', 1.0),)
  rows = (workdir / 'results.csv').read_text().splitlines()
  assert len(rows) == 3
  assert (workdir / 'report' / 'table.md').exists()
  assert capsys.readouterr().out.startswith('cpu: 8 x cpu\n')

  assert call(*arguments) == 0
  assert len(trained.calls) == 2


def test_arguments_may_stand_anywhere(grid, tmp_path):
  before = command_line.parse(
    ['main', '--config.model.L=3', f'--config={grid}', '--mode', 'plan']
  )
  assert before.cells[0].config.model.L == 3
  assert (before.mode, before.workdir, before.only) == ('plan', None, '')


def test_failed_cells_exit_4_and_are_reported(grid, trained, tmp_path, capsys):
  trained.failures['gamma=1.0,seed=1'] = RuntimeError('boom')
  assert call(f'--config={grid}', f'--workdir={tmp_path}/w') == 4
  rows = (tmp_path / 'w' / 'results.csv').read_text().splitlines()
  assert len(rows) == 5
  assert rows[-1].startswith('"gamma=1.0,seed=1",missing')
  trained.failures.clear()
  assert call(f'--config={grid}', f'--workdir={tmp_path}/w') == 0
  assert len(trained.calls) == 5


def test_other_exit_codes(grid, trained, tmp_path, capsys):
  arguments = [f'--config={grid}', f'--workdir={tmp_path}/w', '--only=seed=0']
  trained.failures['gamma=0.5,seed=0'] = Preempted('saved at step 3')
  assert call(*arguments) == 3
  trained.failures['gamma=0.5,seed=0'] = KeyboardInterrupt()
  assert call(*arguments) == main.INTERRUPTED
  assert 'run the same command to go on' in capsys.readouterr().err
  trained.failures = dict.fromkeys(
    ['gamma=0.5,seed=0', 'gamma=1.0,seed=0'], ConfigError('no text')
  )
  assert call(*arguments) == 2
  assert not (tmp_path / 'w' / 'results.csv').exists()


def test_devices_are_checked_before_any_cell_runs(
  grid, trained, tmp_path, capsys
):
  arguments = [f'--config={grid}', f'--workdir={tmp_path}/w']
  mesh = ['--config.mesh.data=8', '--config.train.batch_size=12']
  assert call(*arguments, *mesh) == 2
  err = capsys.readouterr().err
  assert err.startswith('error: train.batch_size = 12 does not divide over 8')
  assert not (tmp_path / 'w').exists()


def test_report_needs_no_config(grid, trained, tmp_path, capsys):
  call(f'--config={grid}', f'--workdir={tmp_path}/w')
  (tmp_path / 'w' / 'results.csv').unlink()
  assert call('--mode=report', f'--workdir={tmp_path}/w') == 0
  assert (tmp_path / 'w' / 'results.csv').exists()


def test_eval_goes_through_the_chosen_cells(grid, trained, tmp_path, capsys):
  arguments = [f'--config={grid}', f'--workdir={tmp_path}/w']
  call(*arguments)
  trained.calls.clear()
  assert call(*arguments, '--mode=eval', '--only=seed=1') == 0
  assert names(trained) == ['gamma=0.5,seed=1', 'gamma=1.0,seed=1']
  other = [*arguments, '--config.opt.lr=0.1', '--mode=eval']
  assert call(*other) == 2
  assert 'made with another config: opt.lr' in capsys.readouterr().err


@pytest.fixture
def planned(monkeypatch):
  """Replaces the plan; gives the (cell ids, workdir) it was called with."""
  fake = types.ModuleType('gamma_jax.plan_report')
  seen = []
  fake.print_plan = lambda cells, workdir: seen.append(
    ([cell.id for cell in cells], workdir)
  )
  monkeypatch.setitem(sys.modules, 'gamma_jax.plan_report', fake)
  monkeypatch.setattr(gamma_jax, 'plan_report', fake, raising=False)
  return seen


def test_plan_gets_the_chosen_cells(grid, planned, tmp_path):
  arguments = [f'--config={grid}', '--mode=plan', '--only=gamma=0.5']
  assert call(*arguments) == 0
  assert call(*arguments, f'--workdir={tmp_path}') == 0
  ids = ['gamma=0.5,seed=0', 'gamma=0.5,seed=1']
  assert planned == [(ids, None), (ids, tmp_path)]


def test_plan_for_a_target_looks_for_no_device(grid, planned, monkeypatch):
  monkeypatch.setattr(platforms, 'choose', lambda _: pytest.fail('looked'))
  target = '--config.plan.target=v5e:2x2'
  assert call(f'--config={grid}', '--mode=plan', target) == 0
  assert len(planned) == 1


def test_help(capsys):
  assert call('--help') == 0
  out = capsys.readouterr().out
  assert '--workdir' in out and '--only' in out and 'Exit codes' in out


def test_platform_that_is_there(capsys):
  assert platforms.choose('cpu') == 'cpu: 8 x cpu'
  assert platforms.choose('') == 'cpu: 8 x cpu'
  with pytest.raises(ConfigError, match='take --config.platform=cpu'):
    platforms.choose('gpu')


def test_platform_without_any_device(monkeypatch):
  def devices():
    raise RuntimeError('Unable to\ninitialize')

  monkeypatch.setattr(jax, 'devices', devices)
  with pytest.raises(ConfigError, match='finds no device: Unable to initial'):
    platforms.choose('')


def test_only_our_own_chatter_is_shown(monkeypatch):
  root = logging.RootLogger(logging.WARNING)
  monkeypatch.setattr(logging, 'root', root)
  main._log_to_stderr()
  (handler,) = root.handlers
  shown = [
    handler.filter(logging.LogRecord(name, level, '', 0, '', (), None))
    for name, level in (
      ('root', logging.INFO),
      ('absl', logging.INFO),
      ('absl', logging.WARNING),
    )
  ]
  assert [bool(s) for s in shown] == [True, False, True]


def test_bad_flags_fail_without_loading_jax():
  code = (
    'import sys; from gamma_jax import main;'
    'rc = main.main(["main", "--config=configs/base.py", "--workdir=x",'
    '"--config.opt.lr=abc"]);'
    'slow = {"jax", "flax", "numpy", "rich"} & set(sys.modules);'
    'sys.exit(rc if not slow else f"loaded {slow}")'
  )
  done = subprocess.run([sys.executable, '-c', code], capture_output=True)
  assert done.returncode == 2, done.stderr
  assert done.stderr == b'error: --config.opt.lr=abc is not a float\n'


def test_as_a_command():
  done = subprocess.run(
    [sys.executable, '-m', 'gamma_jax.main', '--config=configs/base.py'],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert done.stdout == ''
  assert done.stderr == (
    'error: --workdir is missing; --mode=train needs the folder of the runs\n'
  )

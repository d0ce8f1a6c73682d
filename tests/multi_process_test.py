"""One run on several processes: the same losses, batches and files as on one.

Real processes on this machine, joined over loopback.
"""

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from gamma_jax import checkpoint, command_line, files, metric_writer, trainer

ROOT = pathlib.Path(__file__).resolve().parent.parent
# As `python -m gamma_jax.main`, but a dead process is missed sooner.
MAIN = """
import sys
from gamma_jax import distributed, main
distributed.HEARTBEAT_SECONDS = 10
sys.exit(main.main())
"""
CONFIG = """
from configs import base

def get_config(arg=None):
  config = base.get_config()
  config.model.update(D=16, F=32, L=2, N=2, K=1, H=8, V=257, mlp='gelu')
  config.data.tokenizer = 'bytes'
  config.data.dir = '{data}'
  config.opt.warmup_steps = 2
  config.train.update(steps=6, batch_size=8, seq_len=32)
  config.eval.update(documents=4, batch_size=8)
  config.checkpoint.update(every=3, keep=4)
  config.mesh.update(data=1, fsdp=-1)
  config.log.mechanics = 0  # compiles in every process
  return config

def sweep(add):
  for gamma in (0.5, 1.0):
    add({{'init.gamma': gamma}})
"""
CELLS = ('gamma=0.5', 'gamma=1.0')
# What additions in another order do not touch.
EXACT = ('step', 'data/batch_crc32', 'train/tokens_seen')


@pytest.fixture(scope='module')
def file(tmp_path_factory):
  folder = tmp_path_factory.mktemp('config')
  path = folder / 'grid.py'
  path.write_text(CONFIG.format(data=folder / 'data'))
  return path


def start(processes, devices, file, workdir, *flags):
  """Starts one run on many processes."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  env = os.environ | {
    'PYTHONPATH': str(ROOT),
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
  }
  together = [f'--coordinator={address}', f'--process_count={processes}']
  return [
    subprocess.Popen(
      [sys.executable, '-c', MAIN, f'--config={file}', f'--workdir={workdir}']
      + (together + [f'--process_id={i}'] if processes > 1 else [])
      + list(flags),
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=env,
      cwd=ROOT,
    )
    for i in range(processes)
  ]


def end(processes):
  """(exit code, stdout, stderr) of each."""
  out = [p.communicate(timeout=240) for p in processes]
  return [(p.returncode, *o) for p, o in zip(processes, out, strict=True)]


def run(*args):
  results = end(start(*args))
  assert [code for code, *_ in results] == [0] * len(results), results
  return results


def lines(cell):
  return metric_writer.read_metrics(cell / 'metrics.jsonl')


def assert_same(got, want):
  assert [[r[k] for k in EXACT] for r in got] == [
    [r[k] for k in EXACT] for r in want
  ]
  losses = [r['train/loss'] for r in want]
  assert [r['train/loss'] for r in got] == pytest.approx(losses, rel=1e-5)
  norms = [r['opt/grad_norm'] for r in want]
  assert [r['opt/grad_norm'] for r in got] == pytest.approx(norms, rel=1e-4)


def config_of(file, cell):
  cells = command_line.parse(['', f'--config={file}', '--mode=plan']).cells
  return next(c.config for c in cells if c.id == cell)


@pytest.fixture(scope='module')
def two(file, tmp_path_factory):
  """The grid on 2 processes x 2 devices: its folder, what they said."""
  workdir = tmp_path_factory.mktemp('two')
  return workdir, run(2, 2, file, workdir)


@pytest.fixture(scope='module')
def one(file, tmp_path_factory):
  """The first cell on the 8 devices of this process."""
  cell = tmp_path_factory.mktemp('one') / CELLS[0]
  return cell, trainer.train(config_of(file, CELLS[0]), cell)


def cut(workdir, to):
  """A copy of a cell, as if killed after step 5."""
  cell = to / CELLS[0]
  shutil.copytree(workdir / CELLS[0], cell)
  shutil.rmtree(cell / 'checkpoints/6')
  (cell / 'results.json').unlink()
  return cell


def test_two_processes_train_what_one_does(two, one):
  workdir, _ = two
  assert_same(lines(workdir / CELLS[0]), lines(one[0]))
  got = files.read_json(workdir / CELLS[0] / 'results.json')['metrics']
  assert got == pytest.approx(one[1]['metrics'], rel=1e-4)
  assert checkpoint.complete_steps(workdir / CELLS[0] / 'checkpoints') == [3, 6]
  report = files.read_json(workdir / CELLS[0] / 'init_report.json')
  assert report['source'] == 'measured'


def test_only_the_first_process_speaks_and_keeps_files(two):
  workdir, ((_, first, _), (_, second, said)) = two
  assert 'step 6/6' in first
  spoken = [x for x in second.splitlines() if not x.startswith('[Gloo]')]
  assert spoken == []
  assert 'cell 1' not in said
  for cell in CELLS:
    names = {path.name for path in (workdir / cell).iterdir()}
    assert names >= {'config.json', 'metrics.jsonl', 'run.json'}
    (attempt,) = files.read_json(workdir / cell / 'run.json')['attempts']
    assert attempt['exit'] == 'done'
    assert attempt['devices']['processes'] == 2


def test_one_process_goes_on_where_two_were_killed(file, two, one, tmp_path):
  cell = cut(two[0], tmp_path)
  results = trainer.train(config_of(file, CELLS[0]), cell)
  assert results['timing']['steps_timed'] == 3
  assert_same(lines(cell), lines(one[0]))


@pytest.mark.slow
@pytest.mark.parametrize(('processes', 'devices'), [(1, 1), (1, 4), (4, 1)])
def test_any_number_of_processes_goes_on(
  file, two, one, tmp_path, processes, devices
):
  cell = cut(two[0], tmp_path)
  run(processes, devices, file, tmp_path, f'--only={CELLS[0]}')
  timing = files.read_json(cell / 'results.json')['timing']
  assert timing['steps_timed'] == 3
  assert_same(lines(cell), lines(one[0]))


def wait_for(path, count, processes):
  deadline = time.monotonic() + 120
  while time.monotonic() < deadline:
    if path.exists() and path.read_bytes().count(b'\n') >= count:
      return
    assert all(p.poll() is None for p in processes), end(processes)
    time.sleep(0.05)
  raise TimeoutError(path)


@pytest.mark.slow
@pytest.mark.parametrize('victim', [0, 1])
def test_sigterm_to_one_process_saves_in_all(file, tmp_path, victim):
  flags = ('--only=gamma=0.5', '--config.train.steps=5000')
  processes = start(2, 1, file, tmp_path, *flags)
  wait_for(tmp_path / CELLS[0] / 'metrics.jsonl', 5, processes)
  processes[victim].send_signal(signal.SIGTERM)
  results = end(processes)
  assert [code for code, *_ in results] == [3, 3], results
  last = lines(tmp_path / CELLS[0])[-1]['step']
  steps = checkpoint.complete_steps(tmp_path / CELLS[0] / 'checkpoints')
  assert steps[-1] == last


@pytest.mark.slow
@pytest.mark.parametrize('victim', [0, 1])
def test_a_killed_process_ends_the_others(file, tmp_path, victim):
  flags = ('--only=gamma=0.5', '--config.train.steps=100000')
  processes = start(2, 1, file, tmp_path, *flags)
  wait_for(tmp_path / CELLS[0] / 'metrics.jsonl', 5, processes)
  processes[victim].kill()
  began = time.monotonic()
  results = end(processes)
  assert time.monotonic() - began < 60
  assert results[1 - victim][0] not in (0, 3), results


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--coordinator=a:1'], 'needs --process_count'),
    (['--coordinator=a:1', '--process_count=2'], 'needs --process_count'),
    (['--coordinator=host'], 'neither HOST:PORT nor auto'),
    (['--process_count=2'], 'needs --coordinator'),
  ],
)
def test_half_an_address_is_refused(file, flags, message):
  with pytest.raises(command_line.ConfigError, match=message):
    command_line.parse(['', f'--config={file}', '--workdir=x', *flags])

"""Cells as jobs: the printed commands, and jobs that save and come back."""

import os
import shlex
import signal
import sys
import time

import pytest

from gamma_jax import command_line, configure, files, launch, main
from gamma_jax.config import SlurmConfig
from gamma_jax.errors import ConfigError

# Here, as its logger keeps the stderr of its first import: not one of a test.
pytest.importorskip('submitit')

GRID = """
from configs import base

def get_config(arg=None):
  return base.get_config()

def sweep(add):
  for seed in (1, 10):
    add(seed=seed)
"""
# Stands for a run: at SIGTERM it saves and ends with 3; then it goes on.
RUN = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])

def save(*_):
  (folder / 'saved').touch()
  sys.exit(3)

signal.signal(signal.SIGTERM, save)
if not (folder / 'saved').exists():
  (folder / 'job').write_text(str(os.getppid()) + ' ')
  time.sleep(60)
(folder / 'done').touch()
"""


@pytest.fixture
def grid(tmp_path):
  path = tmp_path / 'grid.py'
  path.write_text(GRID)
  return path


def test_one_command_for_each_cell_that_is_not_done(grid, tmp_path, capsys):
  workdir = tmp_path / 'a folder'
  flags = [f'--config={grid}', f'--workdir={workdir}', '--only', 'seed']
  flags += ['--config.sweep.launcher=print', '--config.opt.lr=0.01']
  assert main.main(['main', *flags]) == 0
  printed = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
  assert len(printed) == 2
  command = command_line.parse(printed[0][2:])
  assert printed[0][:3] == ['python', '-m', 'gamma_jax.main']
  assert command.only == 'seed=1'
  assert command.workdir == workdir
  assert command.cells[0].config.opt.lr == 0.01
  assert command.cells[0].config.sweep.launcher == 'local'
  selected = main.sweep.select(command.cells, command.only)
  assert [cell.id for cell in selected] == ['seed=1']  # and not seed=10
  config = configure.to_dict(command.cells[0].config)
  files.write_json(workdir / 'seed=1/config.json', config)
  files.write_json(workdir / 'seed=1/results.json', {'status': 'done'})
  assert main.main(['main', *flags]) == 0
  (line,) = capsys.readouterr().out.splitlines()  # seed=1 is done
  assert '--only=seed=10' in line


def test_without_slurm_there_is_one_line(grid, tmp_path, capsys, monkeypatch):
  monkeypatch.setenv('PATH', '')  # no srun
  flags = [f'--config={grid}', f'--workdir={tmp_path / "w"}']
  assert main.main(['main', *flags, '--config.sweep.launcher=submitit']) == 2
  assert 'finds no SLURM here' in capsys.readouterr().err


def test_a_preempted_job_saves_and_a_failed_one_says_so(tmp_path):
  command = ['python', '-c', RUN, str(tmp_path)]
  good, bad = launch.submit(
    [command, ['python', '-c', 'import sys; sys.exit(4)']],
    tmp_path / 'slurm',
    SlurmConfig(gpus_per_node=0, timeout_min=1),
    'local',
  )
  deadline = time.monotonic() + 60
  job = tmp_path / 'job'
  while not (job.exists() and job.read_text().endswith(' ')):
    assert time.monotonic() < deadline
    time.sleep(0.05)
  os.kill(int(job.read_text()), signal.SIGUSR2)  # as SLURM does
  good.result()
  assert (tmp_path / 'saved').exists()
  assert (tmp_path / 'done').exists()
  assert 'exit code 4' in str(bad.exception())


def test_submitit_is_needed_only_by_its_launcher(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'submitit', None)
  with pytest.raises(ConfigError, match=r'gamma_jax\[slurm\]'):
    launch.submit([], tmp_path, SlurmConfig())

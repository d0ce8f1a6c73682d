"""kill -9 during a sweep, and the same command again, as a user would."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = """
from configs import base

def get_config(arg=None):
  config = base.get_config()
  config.model.update(D=16, F=32, L=2, N=2, K=1, H=8, V=257, mlp='gelu')
  config.data.tokenizer = 'bytes'
  config.data.dir = '{data}'
  config.opt.warmup_steps = 5
  config.train.update(steps=60, batch_size=4, seq_len=32)
  config.checkpoint.every = 7
  config.eval.documents = 6
  return config

def sweep(add):
  for seed in range(2):
    for gamma in (0.5, 1.0):
      add({{'init.gamma': gamma}}, seed=seed)
  add({{'model.D': 24, 'model.H': 12}})
"""


def command(folder, config):
  return [
    sys.executable,
    '-m',
    'gamma_jax.main',
    f'--config={config}',
    f'--workdir={folder}',
  ]


def environment():
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  return env | {'PYTHONPATH': str(ROOT)}


def kill_after(folder, config, cell, lines, log):
  """Starts the sweep and kills it once `cell` has logged so many steps."""
  path = folder / cell / 'metrics.jsonl'
  with open(log, 'w') as out:
    process = subprocess.Popen(
      command(folder, config),
      stdout=out,
      stderr=out,
      env=environment(),
      cwd=ROOT,
    )
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
      if path.exists() and path.read_bytes().count(b'\n') >= lines:
        process.send_signal(signal.SIGKILL)
        break
      time.sleep(0.02)
    assert process.wait() == -signal.SIGKILL, pathlib.Path(log).read_text()


@pytest.mark.slow
def test_a_killed_sweep_ends_with_the_same_results(tmp_path):
  config = tmp_path / 'grid.py'
  config.write_text(CONFIG.format(data=tmp_path / 'data'))
  straight, killed = tmp_path / 'straight', tmp_path / 'killed'
  run = dict(env=environment(), cwd=ROOT, capture_output=True, text=True)
  first = subprocess.run(command(straight, config), **run)
  assert first.returncode == 0, first.stderr
  log = tmp_path / 'log'
  kill_after(killed, config, 'gamma=1.0,seed=0', 20, log)
  kill_after(killed, config, 'gamma=0.5,seed=1', 45, log)
  # Saves are asynchronous: which of them was complete is a matter of luck.
  assert 'resumed from step ' in log.read_text()
  kill_after(killed, config, 'D=24', 20, log)
  last = subprocess.run(command(killed, config), **run)
  assert last.returncode == 0, last.stderr
  csv = (straight / 'results.csv').read_bytes()
  assert csv == (killed / 'results.csv').read_bytes()
  assert csv.count(b',done,') == 5
  again = subprocess.run(command(killed, config), **run)
  assert again.returncode == 0 and '5 of 5 cells are done' in again.stderr

"""Workers that share a grid: no cell twice, and none lost with its worker."""

import json
import os
import subprocess
import sys
import time

import pytest

from gamma_jax import claims, files, sweep
from gamma_jax.config import Config

WORKER = """
import sys, time
from pathlib import Path
from gamma_jax import files, sweep
from gamma_jax.config import Config
sweep.POLL = 0.1

def train(config, folder):
  with open(folder.parent / 'calls', 'a') as calls:
    calls.write(folder.name + chr(10))
  time.sleep(float(sys.argv[2]))
  if config.seed == 5:
    raise RuntimeError('boom')
  files.write_json(folder / 'results.json', {'status': 'done'})

cells = sweep.expand(Config(), lambda add: [add(seed=s) for s in range(6)])
print('ready', flush=True)
while not Path(sys.argv[1], 'go').exists():
  time.sleep(0.01)
sys.exit(sweep.run_sweep(cells, sys.argv[1], train))
"""


def worker(workdir, seconds):
  process = subprocess.Popen(
    [sys.executable, '-c', WORKER, str(workdir), str(seconds)],
    stdout=subprocess.PIPE,
    text=True,
  )
  with process.stdout as out:
    out.readline()
  return process


def calls(workdir):
  path = workdir / 'calls'
  return path.read_text().split() if path.exists() else []


def test_workers_share_a_grid_and_all_see_its_end(tmp_path):
  workers = [worker(tmp_path, 0.5) for _ in range(3)]
  (tmp_path / 'go').touch()
  codes = [w.wait(timeout=60) for w in workers]
  # The failed cell is not tried again by the others, but they know of it.
  assert codes == [sweep.SOME_FAILED] * 3
  assert sorted(calls(tmp_path)) == [f'seed={s}' for s in range(6)]


def test_the_cell_of_a_killed_worker_goes_to_another(tmp_path):
  (tmp_path / 'go').touch()
  first = worker(tmp_path, 600)
  deadline = time.monotonic() + 30
  while not calls(tmp_path) and time.monotonic() < deadline:
    time.sleep(0.05)
  second = worker(tmp_path, 0)
  while len(calls(tmp_path)) < 6 and time.monotonic() < deadline:
    time.sleep(0.05)
  time.sleep(0.5)
  assert second.poll() is None  # it waits for the one that is still at work
  assert calls(tmp_path).count('seed=0') == 1
  first.kill()
  first.wait()
  assert second.wait(timeout=30) == sweep.SOME_FAILED
  assert calls(tmp_path).count('seed=0') == 2


@pytest.fixture
def elsewhere(monkeypatch):
  """Turns this process into one of another host."""

  def move(host):
    monkeypatch.setattr(claims.socket, 'gethostname', lambda: host)

  return move


def test_a_silent_host_loses_its_cell_and_a_live_one_does_not(
  tmp_path, elsewhere, monkeypatch
):
  elsewhere('a')
  a = claims.Claims(tmp_path)
  with a.holding(['x']) as held:
    assert held is not None
    elsewhere('b')
    b = claims.Claims(tmp_path)
    with b.holding(['x']) as held:
      assert held is None
    old = time.time() - claims.SILENCE - 1
    os.utime(tmp_path / 'x.0', (old, old))
    with b.holding(['x']) as held:
      assert held is not None
      # Many that saw the same silence: one wins.
      monkeypatch.setattr(b, '_newest', lambda: {'x': 0})
      assert b._take('x') is None


def test_a_worker_that_lost_its_cell_ends(tmp_path, monkeypatch):
  monkeypatch.setattr(claims, 'BEAT', 0.05)
  ended = []
  monkeypatch.setattr(claims.os, '_exit', ended.append)
  with claims.Claims(tmp_path).holding(['x']):
    (tmp_path / 'x.1').write_text('{}')
    deadline = time.monotonic() + 10
    while not ended and time.monotonic() < deadline:
      time.sleep(0.02)
  assert ended[0] == 1


def test_the_holder_stays_in_touch(tmp_path, monkeypatch):
  monkeypatch.setattr(claims, 'BEAT', 0.05)
  with claims.Claims(tmp_path).holding(['x']):
    os.utime(tmp_path / 'x.0', (1, 1))
    deadline = time.monotonic() + 10
    while (tmp_path / 'x.0').stat().st_mtime == 1:
      assert time.monotonic() < deadline
      time.sleep(0.02)


def test_a_number_of_a_process_used_again_is_no_life(tmp_path):
  mine = claims.Claims(tmp_path)
  holder = dict(mine._me, started='1')  # same pid, another start
  (tmp_path / 'x.0').write_text(json.dumps(holder))
  with mine.holding(['x']) as held:
    assert held is not None


def test_a_group_is_claimed_as_a_whole_or_not_at_all(tmp_path):
  a, b = claims.Claims(tmp_path), claims.Claims(tmp_path)
  with a.holding(['y']):
    with b.holding(['x', 'y']) as held:
      assert held is None
    with a.holding(['x']) as held:  # was given back
      assert held is not None


def test_a_cell_that_failed_before_is_run_again(tmp_path):
  def boom(config, folder):
    raise RuntimeError('boom')

  def fine(config, folder):
    files.write_json(folder / 'results.json', {'status': 'done'})

  cells = sweep.expand(Config(), lambda add: [add(seed=0)])
  assert sweep.run_sweep(cells, tmp_path, boom) == sweep.SOME_FAILED
  assert sweep.run_sweep(cells, tmp_path, fine) == 0

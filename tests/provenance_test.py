"""run.json keeps the account of every start; files are whole or old."""

import datetime
import json
import os
import platform
import socket
import subprocess
import sys

import pytest

from gamma_jax import files, provenance


def _git(folder, *arguments):
  env = {k: v for k, v in os.environ.items() if not k.startswith('GIT_')}
  identity = ['-c', 'user.name=t', '-c', 'user.email=t@example.org']
  done = subprocess.run(
    ['git', '-C', str(folder), *identity, *arguments],
    check=True,
    capture_output=True,
    text=True,
    env=env,
  )
  return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
  _git(tmp_path, 'init')
  (tmp_path / 'code.py').write_text('a = 1\n')
  _git(tmp_path, 'add', 'code.py')
  _git(tmp_path, 'commit', '-m', 'first')
  return tmp_path


def test_clean_checkout(checkout):
  state = provenance.git_state(checkout / 'code.py')
  assert state['sha'] == _git(checkout, 'rev-parse', 'HEAD')
  assert not state['dirty'] and state['diff'] == ''


def test_dirty_checkout_and_cut_diff(checkout, monkeypatch):
  (checkout / 'code.py').write_text('a = 2\n')
  (checkout / 'new.py').write_text('')
  state = provenance.git_state(checkout / 'code.py')
  assert state['dirty'] and '+a = 2' in state['diff']
  assert state['diff_characters'] == len(state['diff'])
  assert state['untracked'] == ['new.py']
  monkeypatch.setattr(provenance, 'MAX_DIFF', 10)
  cut = provenance.git_state(checkout / 'code.py')
  assert len(cut['diff']) == 10 < cut['diff_characters']
  assert cut['diff_sha256'] == state['diff_sha256']


def test_untracked_copy_claims_no_commit(checkout):
  (checkout / 'site').mkdir()
  (checkout / 'site' / 'installed.py').write_text('')
  assert provenance.git_state(checkout / 'site' / 'installed.py') is None


def test_git_hook_variables_do_not_mislead(checkout, monkeypatch):
  monkeypatch.setenv('GIT_DIR', '/nowhere')
  assert provenance.git_state(checkout / 'code.py') is not None


def test_no_git_is_no_failure(checkout, monkeypatch):
  monkeypatch.setenv('PATH', '')
  assert provenance.git_state(checkout / 'code.py') is None


def test_attempts_are_added_and_closed(tmp_path):
  path = tmp_path / 'cell' / 'run.json'
  first = provenance.start(path, 'abc', argv=['train'])
  assert files.read_json(path)['attempts'][first]['exit'] is None
  provenance.finish(path, first, 'preempted', step=40)
  before = files.read_json(path)['attempts'][0]
  second = provenance.start(path, 'abc', resume_step=40)
  provenance.finish(path, second, 'done')
  one, two = files.read_json(path)['attempts']
  assert one == before
  assert (one['exit'], one['step'], one['command']) == (
    'preempted',
    40,
    ['train'],
  )
  assert (two['exit'], two['resume_step']) == ('done', 40)
  assert two['command'] == sys.orig_argv
  for attempt in (one, two):
    start, end = (
      datetime.datetime.fromisoformat(attempt[key]) for key in ('start', 'end')
    )
    assert start.utcoffset() == datetime.timedelta(0) and start <= end


def test_attempt_says_what_made_the_result(tmp_path):
  import jax

  provenance.start(tmp_path / 'run.json', 'abc')
  text = (tmp_path / 'run.json').read_text()
  (attempt,) = json.loads(text)['attempts']
  assert attempt['config_hash'] == 'abc'
  assert attempt['versions']['python'] == platform.python_version()
  assert attempt['versions']['jax'] == jax.__version__
  assert set(provenance.PACKAGES) < set(attempt['versions'])
  assert attempt['devices']['platform'] == jax.default_backend()
  assert attempt['devices']['count'] == jax.device_count()
  del attempt['git']  # a diff may say anything
  assert socket.gethostname() not in json.dumps(attempt)


def test_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
  path = tmp_path / 'x.json'
  files.write_json(path, {'a': 1})

  def fail(*_):
    raise OSError('disk full')

  monkeypatch.setattr(os, 'replace', fail)
  with pytest.raises(OSError, match='disk full'):
    files.write_json(path, {'a': 2})
  assert files.read_json(path) == {'a': 1}
  assert list(tmp_path.iterdir()) == [path]


def test_json_round_trip(tmp_path):
  obj = {'a': [1, 2.5, None, True, 'x'], 'b': {'c': float('inf')}}
  files.write_json(tmp_path / 'x.json', obj)
  assert files.read_json(tmp_path / 'x.json') == obj

"""run.json: which code, packages, devices and command made a result.

One entry in "attempts" for every start of the run, so that a resumed run
keeps the account of its past. Written by process 0 only.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gamma_jax import files

PACKAGES = (
  'gamma_jax',
  'jax',
  'jaxlib',
  'flax',
  'optax',
  'orbax-checkpoint',
  'grain',
  'numpy',
)
MAX_DIFF = 200_000  # characters; a longer diff is cut and says so


def start(
  path: str | os.PathLike,
  config_hash: str,
  *,
  argv: Sequence[str] | None = None,
  **facts: Any,
) -> int:
  """Adds an attempt that is under way to run.json; returns its index.

  Args:
    path: the run.json.
    config_hash: hash of the resolved config.
    argv: the command line; None takes that of this process.
    **facts: anything else JSON can hold, such as resume_step=400.
  """
  path = Path(path)
  run = files.read_json(path) if path.exists() else {'attempts': []}
  run['attempts'].append(
    {
      'start': _now(),
      # Both stay null when the process was killed without a word.
      'end': None,
      'exit': None,
      'config_hash': config_hash,
      'command': list(sys.orig_argv if argv is None else argv),
      **facts,
      'versions': versions(),
      'devices': devices(),
      'git': git_state(),
    }
  )
  files.write_json(path, run)
  return len(run['attempts']) - 1


def finish(
  path: str | os.PathLike, attempt: int, reason: str, **facts: Any
) -> None:
  """Closes an attempt.

  Args:
    path: the run.json.
    attempt: what `start` returned.
    reason: 'done', 'preempted', or one line on what went wrong.
    **facts: anything else JSON can hold, such as step=500.
  """
  run = files.read_json(path)
  run['attempts'][attempt] |= {'end': _now(), 'exit': reason, **facts}
  files.write_json(path, run)


def versions() -> dict[str, str | None]:
  """Versions of Python and PACKAGES; None for one that is not installed."""
  found: dict[str, str | None] = {'python': platform.python_version()}
  for name in PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = None
  return found


def devices() -> dict[str, Any]:
  """Platform, kind and count of what JAX sees over all processes."""
  import jax  # late: reading a report must not start a backend

  return {
    'platform': jax.default_backend(),
    'kind': jax.devices()[0].device_kind,
    'count': jax.device_count(),
    'processes': jax.process_count(),
  }


def git_state(file: str | os.PathLike = __file__) -> dict[str, Any] | None:
  """Commit and uncommitted changes of the checkout that tracks `file`.

  None without git, outside a checkout, or where `file` is not tracked: an
  installed copy inside another project must not claim that project's commit.
  """
  file = Path(file).resolve()
  folder = file.parent
  if _git(folder, 'ls-files', '--error-unmatch', str(file)) is None:
    return None
  top = (_git(folder, 'rev-parse', '--show-toplevel') or str(folder)).strip()
  sha = _git(folder, 'rev-parse', 'HEAD')
  if sha is None:  # tracked but nothing committed yet
    return None
  diff = _git(top, 'diff', 'HEAD', '--no-ext-diff', '--no-color') or ''
  new = _git(top, 'ls-files', '--others', '--exclude-standard') or ''
  return {
    'sha': sha.strip(),
    'dirty': bool(diff or new),
    'diff': diff[:MAX_DIFF],
    'diff_characters': len(diff),  # more than `diff` has when it was cut
    'diff_sha256': hashlib.sha256(diff.encode()).hexdigest(),
    'untracked': new.splitlines()[:100],
  }


def _git(folder: str | os.PathLike, *arguments: str) -> str | None:
  # Inside a git hook GIT_DIR and its kin point at another repository.
  env = {k: v for k, v in os.environ.items() if not k.startswith('GIT_')}
  env['GIT_OPTIONAL_LOCKS'] = '0'  # never disturb a git command of the user
  try:
    done = subprocess.run(
      ['git', '-C', str(folder), *arguments],
      capture_output=True,
      timeout=60,
      env=env,
    )
  except (OSError, subprocess.TimeoutExpired):
    return None
  if done.returncode:
    return None
  return done.stdout.decode('utf-8', errors='replace')


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')

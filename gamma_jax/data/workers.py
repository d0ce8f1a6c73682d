"""Processes that turn texts into shards.

They are commands rather than children of multiprocessing, which would import
the main module again in each of them: JAX, or a script without a guard. A
worker gets its texts through a pipe and ends when that closes, as it does when
the parent is killed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gamma_jax import errors
from gamma_jax.data import foreign, shards
from gamma_jax.data import tokenizer as tokenizer_lib

MOST = 16  # about as many as one reader can feed
_COMMAND = """import sys
sys.path[:] = sys.argv[3:]
from gamma_jax.data import workers
workers.main(*sys.argv[1:3])"""

# Makes the file of a shard; whether there was any need to.
Make = Callable[[shards.Texts, Path], bool]


def default_processes() -> int:
  """One for each core that we may use, up to MOST."""
  if hasattr(os, 'sched_getaffinity'):  # not on a Mac
    return min(len(os.sched_getaffinity(0)), MOST)
  return min(os.cpu_count() or 1, MOST)


def make_all(
  pieces: Iterable[shards.Texts],
  folder: Path,
  tokenizer: tokenizer_lib.Tokenizer | foreign.Foreign,
  name: str,
  processes: int,
  progress: Callable[[int], None],
) -> tuple[list[Path], int]:
  """Makes a file in `folder` of each piece, those that are not there yet.

  Args:
    name: `data.tokenizer`, from which a worker loads `tokenizer` again.
    processes: how many encode at once; 1 starts none.
    progress: called with the position of the pieces that are done.

  Returns:
    The files in the order of the pieces, and how many had to be made.

  Raises:
    ConfigError: the tokenizer cannot hold a text.
    OSError: a file cannot be written, or a worker was killed.
  """
  paths, made, waiting = [], 0, collections.deque()
  folder.mkdir(exist_ok=True)
  with contextlib.ExitStack() as stack:
    if processes == 1:
      make = functools.partial(shards.make, tokenizer=tokenizer)
    else:
      make = stack.enter_context(_workers(name, tokenizer.fingerprint))
    pool = concurrent.futures.ThreadPoolExecutor(processes)
    stack.callback(pool.shutdown, cancel_futures=True)
    for number, texts in enumerate(pieces):
      paths.append(folder / f'{number:06}.shard')
      waiting.append((texts.position, pool.submit(make, texts, paths[-1])))
      if len(waiting) == 2 * processes:  # what memory holds at once
        made += _next(waiting, progress)
    while waiting:
      made += _next(waiting, progress)
  return paths, made


def _next(waiting: collections.deque, progress: Callable[[int], None]) -> bool:
  position, future = waiting.popleft()
  made = future.result()
  progress(position)
  return made


@contextlib.contextmanager
def _workers(name: str, fingerprint: str) -> Iterator[Make]:
  """Yields what many threads may call at once: a worker for each of them."""
  everyone, idle = [], []

  def make(texts: shards.Texts, path: Path) -> bool:
    try:
      worker = idle.pop()
    except IndexError:
      everyone.append(worker := _start(name, fingerprint))
    try:
      pickle.dump((texts, path), worker.stdin)
      worker.stdin.flush()
      answer = pickle.load(worker.stdout)
    except (BrokenPipeError, EOFError) as error:
      raise OSError(f'a worker ended with {worker.wait()}') from error
    idle.append(worker)
    if isinstance(answer, Exception):
      raise answer
    return answer

  try:
    yield make
  finally:
    for worker in everyone:
      with contextlib.suppress(BrokenPipeError), worker:
        pass  # closes its pipes, which ends it, and waits


def _start(name: str, fingerprint: str) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, '-c', _COMMAND, name, fingerprint, *sys.path],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )


def main(name: str, fingerprint: str) -> None:
  """A worker: (Texts, Path) after another on stdin, answers on stdout."""
  # Sent to all processes of a job, but it is for the parent to decide.
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
  answers = os.fdopen(os.dup(1), 'wb', buffering=0)
  os.dup2(2, 1)  # what a library prints is no answer
  load = functools.cache(tokenizer_lib.load_tokenizer)
  # A parent that was killed leaves half a job, or nobody to answer.
  with contextlib.suppress(EOFError, pickle.UnpicklingError, BrokenPipeError):
    while True:
      texts, path = pickle.load(sys.stdin.buffer)
      try:
        if load(name).fingerprint != fingerprint:
          raise errors.ConfigError(f'data.tokenizer: {name} has just changed')
        answer = shards.make(texts, path, load(name))
      except (errors.ConfigError, OSError) as error:
        answer = error
      pickle.dump(answer, answers)

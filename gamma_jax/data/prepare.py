"""Makes the folder of tokens that a data config asks for, once.

`<data.dir>/<kind>-<fingerprint>/` holds the TFDS dataset and `manifest.json`.
It is built under another name and renamed when whole, so that what a kill
leaves behind is never taken for complete. Text of more than one shard is
encoded by several processes into files of `.<kind>-<fingerprint>.shards`, where
the next call finds them after a kill. The number of processes changes nothing
in the folder; while it is made, the disk also holds the text and its tokens.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import rich.console
import rich.progress
import tensorflow_datasets as tfds

from gamma_jax import errors
from gamma_jax.config import DataConfig
from gamma_jax.data import builder as builder_lib
from gamma_jax.data import foreign, shards, sources, workers
from gamma_jax.data import tokenizer as tokenizer_lib

FORMAT = 2  # raise it when the same config would give other files
MANIFEST = 'manifest.json'


def prepare(data: DataConfig, processes: int | None = None) -> Path:
  """Returns the folder of `data`, building it first when it is not there.

  Any number of processes may call this at once: one builds, the others wait.

  Args:
    processes: how many encode; None: one a core, within reason.

  Raises:
    ConfigError: no such source or tokenizer, a folder that cannot be written or
      was damaged, or a source without a document.
  """
  if not 0 <= data.heldout_percent < 100:
    raise errors.ConfigError(
      f'data.heldout_percent: {data.heldout_percent} is not in [0, 100)'
    )
  if processes is not None and processes < 1:
    raise errors.ConfigError(f'processes: {processes} is not above 0')
  tokenizer = tokenizer_lib.load_tokenizer(data.tokenizer)
  source = sources.open_source(data.source, tokenizer)
  key = [FORMAT, source.kind, source.identity, tokenizer.fingerprint]
  key.append(float(data.heldout_percent))
  fingerprint = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
  folder = Path(data.dir).expanduser() / f'{source.kind}-{fingerprint}'
  if not _complete(folder):
    try:
      folder.parent.mkdir(parents=True, exist_ok=True)
      with _lock(folder):
        if not _complete(folder):
          _build(data, source, tokenizer, folder, processes)
    except (OSError, EOFError) as error:  # EOF: a .gz cut short
      raise errors.ConfigError(
        f'data: cannot prepare {data.source} in {folder.parent} ({error})'
      ) from error
  return folder


def read_manifest(folder: Path) -> dict:
  return json.loads((folder / MANIFEST).read_text())


def _complete(folder: Path) -> bool:
  """Whether `folder` is there; when it is, it has to be as it was written."""
  if not folder.exists():
    return False
  try:
    files = read_manifest(folder)['files']
    if all((folder / f).stat().st_size == size for f, size in files.items()):
      return True
  except (OSError, ValueError, KeyError):
    pass
  raise errors.ConfigError(f'data.dir: {folder} is damaged; delete it')


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
  """Lets one process at a time build `folder`; the system ends it on a kill."""
  with open(f'{folder}.lock', 'w') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      print(f'waiting: {folder.name} is being prepared', file=sys.stderr)
      fcntl.flock(lock, fcntl.LOCK_EX)
    yield


def _build(
  data: DataConfig,
  source: sources.Source,
  tokenizer: tokenizer_lib.Tokenizer | foreign.Foreign,
  folder: Path,
  processes: int | None,
) -> None:
  made = folder.with_name(f'.{folder.name}.shards')
  for left in folder.parent.glob(f'.{folder.name}.*'):  # by a killed process
    if left != made:
      shutil.rmtree(left)
  # A name of its own as well, for file systems where the lock does nothing.
  partial = Path(tempfile.mkdtemp(prefix=f'.{folder.name}.', dir=folder.parent))
  try:
    with _progress(data.source, 2 * source.size) as progress:
      encoded = _encode(data, source, tokenizer, made, processes, progress)
      builder = builder_lib.Documents(
        data_dir=partial,
        shards=encoded,
        parts=source.parts,
        tokenizer=tokenizer,
        heldout_percent=data.heldout_percent,
        progress=lambda position: progress(source.size + position),
      )
      _write(builder)
    manifest = {
      'fingerprint': folder.name,
      'source': data.source,
      'tokenizer': data.tokenizer,
      'tokenizer_fingerprint': tokenizer.fingerprint,
      'vocab_size': tokenizer.vocab_size,
      'eot_id': tokenizer.eot_id,
      'heldout_percent': data.heldout_percent,
      'content': builder.content.hexdigest(),
      'dataset': str(Path(builder.data_dir).relative_to(partial)),
      'splits': builder.counts,
      'duplicates': builder.duplicates,
      'changed': builder.changed,
      'files': {
        str(path.relative_to(partial)): path.stat().st_size
        for path in sorted(partial.rglob('*'))
        if path.is_file()
      },
    }
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
    partial.chmod(0o755)  # mkdtemp's is for its owner alone
    try:
      os.rename(partial, folder)
    except OSError:
      if not _complete(folder):  # else another process was faster: same files
        raise
    shutil.rmtree(made, ignore_errors=True)
  except errors.ConfigError:  # the text has to change, and with it the shards
    shutil.rmtree(made, ignore_errors=True)
    raise
  finally:
    shutil.rmtree(partial, ignore_errors=True)


class _Files:
  """Shards of files, from the first to the last as often as wanted."""

  def __init__(self, paths: list[Path]):
    self._paths = paths

  def __iter__(self) -> Iterator[shards.Shard]:
    return map(shards.read, self._paths)


def _encode(
  data: DataConfig,
  source: sources.Source,
  tokenizer: tokenizer_lib.Tokenizer | foreign.Foreign,
  folder: Path,
  processes: int | None,
  progress: Callable[[int], None],
) -> Iterable[shards.Shard]:
  """All documents; by way of files in `folder` if they fill more than one."""
  pieces = shards.cut(source.documents())
  first = list(itertools.islice(pieces, 2))
  if len(first) < 2:
    return [shards.encode(texts, tokenizer) for texts in first]
  paths, new = workers.make_all(
    itertools.chain(first, pieces),
    folder,
    tokenizer,
    data.tokenizer,
    processes or workers.default_processes(),
    progress,
  )
  if new < len(paths):
    found = f'{len(paths) - new} of {len(paths)} shards were there'
    print(found, file=sys.stderr, flush=True)
  return _Files(paths)


def _write(builder: builder_lib.Documents) -> None:
  tfds.disable_progress_bar()  # we draw our own
  config = tfds.download.DownloadConfig(try_download_gcs=False)
  with contextlib.redirect_stdout(io.StringIO()):  # it speaks of downloads
    builder.download_and_prepare(download_config=config)


@contextlib.contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
  """A bar on a terminal, a few lines elsewhere; yields what to call."""
  console = rich.console.Console(stderr=True)
  title = f'preparing {name}'
  start = time.monotonic()
  if console.is_terminal:
    with rich.progress.Progress(console=console) as bar:
      task = bar.add_task(title, total=total)
      yield lambda done: bar.update(task, completed=done)
  else:
    shown = set()

    def show(done: int) -> None:
      percent = 25 * (4 * done // total)
      if percent not in shown:
        shown.add(percent)
        print(f'{title}: {percent}%', file=sys.stderr, flush=True)

    yield show
  seconds = time.monotonic() - start
  print(f'prepared {name} in {seconds:.1f} s', file=sys.stderr, flush=True)

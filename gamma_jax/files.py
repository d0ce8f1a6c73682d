"""Files that are either old or new, never half written.

JSON here is strict: NaN and infinities, which JSON has no numbers for, are
written as the strings of `_NON_FINITE` and read back as floats.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from pathlib import Path
from typing import Any

from gamma_jax.errors import ConfigError

_NON_FINITE = {'NaN': math.nan, 'Infinity': math.inf, '-Infinity': -math.inf}


def check_empty(out: Path) -> None:
  """Raises ConfigError if there is something to lose in `out`."""
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise ConfigError(f'--out={out} is not an empty folder; choose another')


def write_text(path: str | os.PathLike, text: str) -> None:
  """Replaces `path` by `text` in one step that survives a power cut."""
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  # The same folder: os.replace is atomic only within one file system. A name
  # of its own: a number of a process is not one over several hosts.
  temporary = path.with_name(f'.{path.name}.{uuid.uuid4().hex[:12]}.tmp')
  try:
    with open(temporary, 'w', encoding='utf-8', newline='') as f:
      f.write(text)
      f.flush()
      os.fsync(f.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)
  folder = os.open(path.parent, os.O_RDONLY)  # the rename itself
  try:
    os.fsync(folder)
  finally:
    os.close(folder)


def to_json(obj: Any, indent: int | None = None) -> str:
  """Strict JSON text; keys keep their order."""
  return json.dumps(_encode(obj), indent=indent, allow_nan=False)


def from_json(text: str) -> Any:
  """Inverse of `to_json`."""
  return _decode(json.loads(text))


def write_json(path: str | os.PathLike, obj: Any) -> None:
  """Atomic, indented, with a newline at the end."""
  write_text(path, to_json(obj, indent=2) + '\n')


def read_json(path: str | os.PathLike) -> Any:
  """Inverse of `write_json`."""
  return from_json(Path(path).read_text(encoding='utf-8'))


def _encode(obj: Any) -> Any:
  if isinstance(obj, dict):
    return {key: _encode(value) for key, value in obj.items()}
  if isinstance(obj, (list, tuple)):
    return [_encode(value) for value in obj]
  if not isinstance(obj, float) or math.isfinite(obj):
    return obj
  if math.isnan(obj):
    return 'NaN'
  return 'Infinity' if obj > 0 else '-Infinity'


def _decode(obj: Any) -> Any:
  if isinstance(obj, dict):
    return {key: _decode(value) for key, value in obj.items()}
  if isinstance(obj, list):
    return [_decode(value) for value in obj]
  return _NON_FINITE.get(obj, obj) if isinstance(obj, str) else obj

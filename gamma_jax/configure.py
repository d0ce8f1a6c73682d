"""The seam: ConfigDict -> frozen Config; Config -> JSON, hash, compile key.

Below this file nothing sees ml_collections. A path is the dotted name that a
user types: `init.gamma`. Imports no JAX, so bad input fails at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import numbers
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from gamma_jax import limits
from gamma_jax.config import Config
from gamma_jax.errors import ConfigError

# Enter the compiled train step as arguments (train_step.Hyper), or, as the
# options of init, only the small program that draws the parameters.
TRACED = ('seed', 'init', 'model.norm_eps', 'opt.lr', 'opt.weight_decay')
# Shape no program.
LABELS = (
  'size',
  'platform',
  'compile_cache',
  'data',
  'checkpoint',
  'eval',
  'log',
  'sweep',
  'plan',
)
# Where and how a run is kept, not what it computes. The mesh is here because a
# run may go on with other devices; data.workers is not: it changes the order.
UNHASHED = (
  'size',
  'platform',
  'compile_cache',
  'mesh',
  'log',
  'checkpoint',
  'sweep',
  'plan',
  'data.dir',
  'eval.batch_size',
  'eval.tasks',
  'eval.max_items',
  'eval.shots',
  'eval.new_tokens',
  'eval.temperature',
  'eval.top_p',
  'eval.sample_seed',
)
_ARTICLES = {int: 'an int', float: 'a float', bool: 'a bool', str: 'a string'}


def resolve(config: Any) -> Config:
  """Builds a Config from a ConfigDict or nested mapping.

  Missing keys take their defaults. Ranges are `validate`'s business.

  Raises:
    ConfigError: unknown key (with the nearest one), or wrong type. An int is
      taken for a float; nothing else is converted.
  """
  return _resolve_group(Config, config, '')


def validate(config: Config) -> Config:
  """Returns `config`; a value out of range raises ConfigError."""
  limits.check(config)
  return config


def to_dict(config: Config) -> dict[str, Any]:
  """Nested dict that JSON can hold; `from_dict` is its exact inverse."""
  return dataclasses.asdict(config) | {
    'data': dataclasses.asdict(config.data)
    | {'mixture': [list(pair) for pair in config.data.mixture]}
  }


def from_dict(config: Mapping[str, Any]) -> Config:
  """Inverse of `to_dict`; a key that an older version lacked gets its default.

  Raises:
    ConfigError: as `resolve`.
  """
  return resolve(config)


def config_hash(config: Config) -> str:
  """16 hex digits over every field that changes numbers (not UNHASHED)."""
  text = json.dumps(_hashed(config), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(old: Config, new: Config) -> list[str]:
  """What keeps the hashes apart, as `train.steps (400, now 500)`."""
  before, after = _hashed(old), _hashed(new)
  return [
    f'{path} ({before[path]!r}, now {after[path]!r})'
    for path in after
    if before[path] != after[path]
  ]


def program_key(config: Config) -> Config:
  """`config` with all that its compiled program does not depend on reset.

  Cells of one shape give equal keys, hence one compile.
  """
  for path in (*TRACED, *LABELS):
    config = _replace(config, path.split('.'), attrgetter(path)(Config()))
  return config


def get_by_path(config: Config, path: str) -> Any:
  """Value of a field.

  Raises:
    ConfigError: no such field.
  """
  _field_type(path)
  return attrgetter(path)(config)


def replace_by_path(config: Config, path: str, value: Any) -> Config:
  """`config` with one field replaced, typed as in `resolve`.

  Raises:
    ConfigError: no such field, or wrong type.
  """
  value = _leaf(_field_type(path), value, path)
  return _replace(config, path.split('.'), value)


def check_path(path: str) -> None:
  """Raises ConfigError unless `path` names a field (a group is none)."""
  _field_type(path)


@functools.cache
def fields() -> dict[str, Any]:
  """Path of every field -> its type, in the order of config.py."""
  return dict(_walk(Config, ''))


@functools.cache
def groups() -> tuple[str, ...]:
  """Path of every group: model, init, init.overrides, ..."""
  parents = [_parent(path) for path in fields()]
  return tuple(dict.fromkeys(p for p in parents if p))


def describe_type(path: str) -> str:
  """`an int`, `a float`, ... of a field."""
  kind = _field_type(path)
  return _ARTICLES.get(_unwrap(kind), 'a dict of part: weight')


def check_devices(
  config: Config, n_devices: int, platform: str | None = None
) -> None:
  """Checks what depends on the devices.

  Args:
    config: one cell.
    n_devices: how many.
    platform: cpu, gpu or tpu; None does not check kernels.

  Raises:
    ConfigError: the mesh does not fit, or does not divide a batch or a weight,
      or a kernel is not one of the platform.
  """
  from gamma_jax import sharding  # late: it imports JAX

  if platform is not None:
    limits.check_platform(config, platform)
  sizes = sharding.mesh_shape(config.mesh, n_devices)
  mesh = dict(zip(sharding.AXES, sizes, strict=True))
  limits.check_divisible(
    config,
    rows=functools.reduce(
      lambda n, axis: n * mesh[axis], sharding.BATCH_AXES, 1
    ),
    tensor=mesh['tensor'],
    embed=mesh['fsdp'] * mesh['expert'],
    expert=mesh['expert'],
  )


def _resolve_group(cls: type, values: Any, path: str):
  if not hasattr(values, 'items'):
    raise ConfigError(f'{path or "config"} is a group of keys, got {values!r}')
  kinds = _kinds(cls)
  found = {}
  for name, value in values.items():
    full = f'{path}.{name}' if path else str(name)
    if name not in kinds:
      raise _unknown(full)
    kind = kinds[name]
    if dataclasses.is_dataclass(kind):
      found[name] = _resolve_group(kind, value, full)
    else:
      found[name] = _leaf(kind, value, full)
  return cls(**found)


def _leaf(kind: Any, value: Any, path: str) -> Any:
  """Checks and converts one value to the type of its field."""
  if isinstance(kind, types.UnionType) and value is None:
    return None
  kind = _unwrap(kind)
  if typing.get_origin(kind) is tuple:
    return _mixture(value, path)
  # Numbers by their abstract kind, so that numpy's scalars are welcome.
  number = not isinstance(value, bool)
  if kind is float and number and isinstance(value, numbers.Real):
    return float(value)
  if kind is int and number and isinstance(value, numbers.Integral):
    return int(value)
  if kind in (bool, str) and isinstance(value, kind):
    return kind(value)
  if value is None:
    raise ConfigError(f'{path} is not set; it is {_ARTICLES[kind]}')
  hint = ''
  if kind is int and isinstance(value, float) and value.is_integer():
    hint = f'; write {int(value)}'
  raise ConfigError(
    f'{path}: expected {_ARTICLES[kind]}, got {value!r} '
    f'({type(value).__name__}){hint}'
  )


def _mixture(value: Any, path: str) -> tuple[tuple[str, float], ...]:
  """Pairs of a mapping, by name, or of a sequence as it is."""
  pairs: Any = value
  if hasattr(value, 'items'):
    # One order whatever the user typed: the data order depends on it.
    pairs = sorted(value.items())
  is_pairs = isinstance(pairs, Sequence) and all(
    isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
    for pair in pairs
  )
  if isinstance(pairs, str) or not is_pairs:
    raise ConfigError(f'{path}: expected part: weight, got {value!r}')
  return tuple(
    (_leaf(str, part, path), _leaf(float, weight, f'{path}.{part}'))
    for part, weight in pairs
  )


def _unknown(path: str) -> ConfigError:
  """What to say of a key that does not exist."""
  known = [*fields(), *groups()]
  group, _, name = path.rpartition('.')
  level = {p.rpartition('.')[2]: p for p in known if _parent(p) == group}
  tails = {p.rpartition('.')[2]: p for p in reversed(known)}
  # A slip of the hand in this group, or the right name in the wrong group.
  near = [tails[name]] if name in tails else []
  for names in (level, tails):
    near += [names[n] for n in difflib.get_close_matches(name, names, 1)]
  if near:
    return ConfigError(f'unknown key {path}; did you mean {near[0]}?')
  names = ', '.join(level.values() or [p for p in known if '.' not in p])
  return ConfigError(f'unknown key {path}; known: {names}')


def _parent(path: str) -> str:
  return path.rpartition('.')[0]


def _field_type(path: str) -> Any:
  if path in fields():
    return fields()[path]
  if path in groups():
    names = [p for p in fields() if p.startswith(f'{path}.')]
    raise ConfigError(f'{path} is a group; set one of {", ".join(names)}')
  raise _unknown(path)


def _unwrap(kind: Any) -> Any:
  """`float | None` -> float."""
  if not isinstance(kind, types.UnionType):
    return kind
  (inner,) = (k for k in typing.get_args(kind) if k is not types.NoneType)
  return inner


@functools.cache
def _kinds(cls: type) -> dict[str, Any]:
  return typing.get_type_hints(cls)


def _walk(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
  for name, kind in _kinds(cls).items():
    if dataclasses.is_dataclass(kind):
      yield from _walk(kind, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', kind


def _replace(config: Any, names: Sequence[str], value: Any):
  name, *rest = names
  if rest:
    value = _replace(getattr(config, name), rest, value)
  return dataclasses.replace(config, **{name: value})


def _hashed(config: Config) -> dict[str, Any]:
  return {
    path: attrgetter(path)(config)
    for path in fields()
    if not any(path == out or path.startswith(f'{out}.') for out in UNHASHED)
  }

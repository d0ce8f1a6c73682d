"""Flags and config files: from argv to a base config and its grid.

Any mistake in them becomes a ConfigError of one line. Imports no JAX.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import inspect
import re
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from gamma_jax import configure, sweep
from gamma_jax.errors import ConfigError

MODES = ('train', 'plan', 'report', 'eval')
_OVERRIDE = re.compile(r'--?(?:no)?config\.([^=]*)')


@dataclasses.dataclass(frozen=True)
class Command:
  """What the user asked for.

  Attributes:
    mode: one of MODES, or `help`.
    workdir: None where the mode needs none.
    only: substring of the cell ids to take.
    cells: the whole grid; empty in modes report and help.
    help: text of --help.
    processes: coordinator, count and id, for distributed.initialize.
    argv: as given, without the program's name.
  """

  mode: str
  workdir: Path | None
  only: str
  cells: Sequence[sweep.Cell]
  help: str = ''
  processes: tuple[str, int, int] = ('', -1, -1)
  argv: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class _ConfigFile:
  """A config file that was run.

  Attributes:
    path: as its tracebacks name it.
    config: what get_config returned; --config.key=value changes it.
    sweep: its grid, if it has one.
  """

  path: str
  config: ml_collections.ConfigDict
  sweep: Callable[..., None] | None


def parse(argv: Sequence[str]) -> Command:
  """Reads argv (with the program's name first).

  Raises:
    ConfigError: anything the user got wrong.
  """
  # Two passes: the first finds the config file, which says which
  # --config.key flags there are.
  try:
    first = flags.FlagValues()
    flags.DEFINE_string('config', None, '', flag_values=first)
    first.set_gnu_getopt(True)
    rest = first(list(argv), known_only=True)
    overrides = [m[1] for m in map(_OVERRIDE.match, rest) if m]
    for path in overrides:
      configure.check_path(path)
    if overrides and not first['config'].value:
      raise ConfigError(f'--config.{overrides[0]} needs --config=FILE')
    file = _load(first['config'].value) if first['config'].value else None
    values = _flag_values(file, rest)
    left = values(rest)
  except flags.Error as error:
    raise ConfigError(_explain(error)) from error
  if left[1:]:
    raise ConfigError(f'unexpected argument {left[1]!r}; flags start with --')
  command = _command(values, file, overrides)
  return dataclasses.replace(command, argv=tuple(argv[1:]))


def _command(
  values: flags.FlagValues, file: _ConfigFile | None, fixed: Sequence[str]
) -> Command:
  mode = values['mode'].value
  workdir = values['workdir'].value
  if values['help'].value:
    return Command('help', None, '', (), values.get_help())
  if mode != 'report' and file is None:
    raise ConfigError(
      '--config is missing; for example --config=configs/sweep_tiny.py'
    )
  if mode != 'plan' and not workdir:
    raise ConfigError(
      f'--workdir is missing; --mode={mode} needs the folder of the runs'
    )
  cells: Sequence[sweep.Cell] = ()
  if file is not None:
    base = configure.resolve(values['config'].value)
    cells = _in_file(file.path, sweep.expand, base, file.sweep, fixed)
  path = Path(workdir).expanduser() if workdir else None
  only = values['only'].value
  return Command(mode, path, only, cells, processes=_processes(values))


def _flag_values(file: _ConfigFile | None, argv: list[str]) -> flags.FlagValues:
  values = flags.FlagValues()
  values.set_gnu_getopt(True)
  flags.DEFINE_string('workdir', None, 'folder of the runs', flag_values=values)
  flags.DEFINE_enum('mode', 'train', MODES, 'what to do', flag_values=values)
  flags.DEFINE_string(
    'only', '', 'take the cells whose id contains this', flag_values=values
  )
  flags.DEFINE_string(
    'coordinator',
    '',
    'one run on many processes: HOST:PORT of process 0, or auto (SLURM, TPU)',
    flag_values=values,
  )
  for name, text in (('count', 'how many'), ('id', 'which, from 0')):
    flags.DEFINE_integer(
      f'process_{name}', -1, f'{text}; with HOST:PORT', flag_values=values
    )
  flags.DEFINE_bool('help', False, 'show this', flag_values=values)
  if file is not None:
    config_flags.DEFINE_config_dict(
      'config',
      file.config,
      'file with get_config(arg) and, for a grid, sweep(add): FILE[:arg]; '
      '--config.key=value overrides a field',
      flag_values=values,
      sys_argv=argv,
    )
  return values


def _processes(values: flags.FlagValues) -> tuple[str, int, int]:
  names = ('coordinator', 'process_count', 'process_id')
  where, count, index = (values[name].value for name in names)
  if ':' in where and not 0 <= index < count:
    raise ConfigError(
      f'--coordinator={where} needs --process_count=N and --process_id=0..N-1'
    )
  if ':' not in where and (count, index) != (-1, -1):
    raise ConfigError('--process_count needs --coordinator=HOST:PORT')
  if where and where != 'auto' and ':' not in where:
    raise ConfigError(f'--coordinator={where} is neither HOST:PORT nor auto')
  return where, count, index


def _load(config: str) -> _ConfigFile:
  """Runs a config file, FILE[:arg]."""
  name, colon, arg = config.partition(':')
  path = Path(name)
  if not path.is_file():
    siblings = [p.as_posix() for p in sorted(path.parent.glob('*.py'))]
    near = difflib.get_close_matches(path.as_posix(), siblings, 1)
    hint = f'; did you mean {near[0]}?' if near else ''
    raise ConfigError(f'there is no config file {name}{hint}')
  spec = importlib.util.spec_from_file_location('gamma_jax_config', path)
  if spec is None or spec.loader is None:
    raise ConfigError(f'config file {name} must end in .py')
  module = importlib.util.module_from_spec(spec)
  file = module.__file__ or ''
  _in_file(file, spec.loader.exec_module, module)
  if not callable(getattr(module, 'get_config', None)):
    raise ConfigError(f'config file {name} has no function get_config')
  base = _in_file(file, module.get_config, *([arg] if colon else []))
  if not isinstance(base, ml_collections.ConfigDict):
    raise ConfigError(f'{name}: get_config must return a ConfigDict')
  grid = getattr(module, 'sweep', None)
  if grid is not None and not callable(grid):
    raise ConfigError(f'{name}: sweep must be a function')
  if grid and colon and 'arg' in inspect.signature(grid).parameters:
    grid = functools.partial(grid, arg=arg)
  return _ConfigFile(file, base, grid)


def _in_file(path: str, function: Callable[..., Any], *arguments: Any) -> Any:
  """Calls what may run the user's file; its errors name file and line."""
  try:
    return function(*arguments)
  except ConfigError:
    raise
  except Exception as error:
    where, text = Path(path).name, ' '.join(str(error).split())
    if type(error) is ValueError:  # the file's own message
      raise ConfigError(f'{where}: {text}') from error
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    where += f':{lines[-1]}' if lines else ''
    raise ConfigError(f'{where}: {type(error).__name__}: {text}') from error


def _explain(error: flags.Error) -> str:
  """absl's message on one line; for a config field it says what it takes."""
  text = ' '.join(str(error).split())
  match = re.match(r'flag --config\.([^=]+)=(.*?): ', text)
  if isinstance(error, flags.IllegalFlagValueError) and match:
    path, value = match.groups()
    return f'--config.{path}={value} is not {configure.describe_type(path)}'
  return text

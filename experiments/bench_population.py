"""Eight cells in one program beside eight `main` processes, on this machine.

  python -m experiments.bench_population [--steps=400] [--rounds=1] [--out=DIR]

The grid is configs/sweep_tiny.py: 8 cells of one shape. Three ways to train it,
each from an empty compile cache with the data prepared before:
  together  one `main` on the grid (sweep.population = auto)
  one by one  eight `main` processes, a cell each, one after another
  two by two  the same eight, two at a time, as on a machine with two cores
Separate processes make no report; the grid's is part of its time. The result
is a ratio of wall times of one round; rounds alternate the order.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from configs import sweep_tiny
from gamma_jax import files

BASE = 'configs/base.py'
GRID = 'configs/sweep_tiny.py'


def cells() -> list[dict]:
  """Overrides of every cell of the grid."""
  found = []
  sweep_tiny.sweep(lambda *parts, **more: found.append(_merged(parts, more)))
  return found


def _merged(parts, more) -> dict:
  merged = dict(more)
  for part in parts:
    merged |= part
  return merged


def _main(config: str, workdir: Path, cache: Path, data: Path, **overrides):
  flags = {
    'compile_cache': cache,
    'data.dir': data,
    'platform': 'cpu',
    **overrides,
  }
  subprocess.run(
    [sys.executable, '-m', 'gamma_jax.main', f'--config={config}']
    + [f'--workdir={workdir}']
    + [f'--config.{key}={value}' for key, value in flags.items()],
    check=True,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )


def together(folder: Path, data: Path, steps: int) -> None:
  """The grid as one process."""
  _main(GRID, folder / 'run', folder / 'cache', data, **{'train.steps': steps})


def apart(folder: Path, data: Path, steps: int, at_once: int) -> None:
  """A process for each cell, `at_once` of them running."""
  shared = {
    'model.mlp': sweep_tiny.get_config().model.mlp,
    'train.steps': steps,
  }
  with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
    jobs = [
      pool.submit(
        _main, BASE, folder / str(i), folder / 'cache', data, **shared | cell
      )
      for i, cell in enumerate(cells())
    ]
    for job in jobs:
      job.result()


def seconds(way: Callable[[Path], None]) -> float:
  """Wall time of one way in a folder of its own."""
  with tempfile.TemporaryDirectory() as folder:
    begin = time.monotonic()
    way(Path(folder))
    return time.monotonic() - begin


def main() -> None:
  """Prints the times and their ratios; with --out also writes them."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--steps', type=int, default=400)
  parser.add_argument('--rounds', type=int, default=1)
  parser.add_argument('--out', type=Path)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as data:
    data = Path(data)
    short = {'train.steps': 1, 'opt.warmup_steps': 0}
    _main(BASE, data / 'warm', data / 'cache', data, **short)
    ways = {
      'together': lambda f: together(f, data, args.steps),
      'one by one': lambda f: apart(f, data, args.steps, 1),
      'two by two': lambda f: apart(f, data, args.steps, 2),
    }
    rounds = []
    for number in range(args.rounds):
      order = list(ways) if number % 2 == 0 else list(ways)[::-1]
      rounds.append({name: seconds(ways[name]) for name in order})
      print(json.dumps(rounds[-1]), flush=True)
  ratios = {
    name: [r['together'] / r[name] for r in rounds]
    for name in ('one by one', 'two by two')
  }
  for name, values in ratios.items():
    print(f'together / {name}: ' + ', '.join(f'{v:.2f}' for v in values))
  if args.out:
    result = {
      'cells': len(cells()),
      'steps': args.steps,
      'cores': os.cpu_count(),
      'python': platform.python_version(),
      'seconds': rounds,
      'together_over': ratios,
    }
    files.write_json(args.out / 'bench_population.json', result)


if __name__ == '__main__':
  main()

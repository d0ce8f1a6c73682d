"""What log.mechanics costs beside training, on this machine.

  python -m experiments.bench_mechanics [--config=configs/sweep_tiny.py]

Times the train step and the measurement in turn, round after round, and prints
the share of training time that the measurements of a run take: those due at the
default cadence over all its steps. Compiling the measurement is told apart: it
happens once a shape and lands in the compile cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from pathlib import Path

import jax

from gamma_jax import configure, mechanics, population, sharding, streams
from gamma_jax import program as program_lib
from gamma_jax.config import Config


def load(path: str) -> Config:
  """The base config of a config file, as one cell."""
  spec = importlib.util.spec_from_file_location(Path(path).stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return configure.resolve(module.get_config())


def seconds(fn) -> float:
  """Wall time until the result is there."""
  begin = time.perf_counter()
  jax.block_until_ready(fn())
  return time.perf_counter() - begin


def main() -> None:
  """Prints the shares for the run of the config and for a longer one."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--config', default='configs/sweep_tiny.py')
  parser.add_argument('--rounds', type=int, default=20)
  args = parser.parse_args()
  config = load(args.config)
  devices = sharding.devices_for(config.mesh)
  program = program_lib.build(configure.program_key(config), devices)
  engine = population.Single(config, program)
  measures = mechanics.Mechanics(engine, [config])
  batches = streams.Streams([config])
  state = engine.init()
  compiling = seconds(lambda: measures.measure(state, 0))
  steps, measured = [], []
  for _ in range(args.rounds + 3):
    batch = next(batches)
    begin = time.perf_counter()
    state, out = engine.step(state, batch)
    jax.block_until_ready((state, out))
    steps.append(time.perf_counter() - begin)
    measured.append(seconds(lambda state=state: measures.measure(state, 0)))
  # The first rounds warm up.
  ratio = statistics.median(measured[3:]) / statistics.median(steps[3:])
  print(f'one measurement is {ratio:.2f} train steps')
  first = compiling / statistics.median(steps[3:])
  print(f'its first call, which compiles it, {first:.0f}')
  for total in (config.train.steps, 10 * config.train.steps):
    every = config.log.mechanics
    count = sum(mechanics.is_due(s, every, total) for s in range(total + 1))
    share = count * ratio / total
    print(f'{count} measurements in {total} updates: {share:.1%} of their time')


if __name__ == '__main__':
  main()

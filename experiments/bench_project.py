"""Train steps with projections as 2-D products, beside plain einsums.

  python -m experiments.bench_project [--rounds=20]

Both steps are compiled from one model, differing in `layers.project` alone, and
run in turn, round after round; medians and their ratio are printed for each
width. The loss chunks are products of two matrices in both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from gamma_jax import layers, train_step
from gamma_jax.config import Config, ModelConfig, TrainConfig

# Width, vocabulary, kind of MLP.
SHAPES = ((24, 257, 'gelu'), (96, 257, 'gelu'), (256, 4096, 'swiglu'))
B, T = 4, 256


def einsum(equation, x, kernel, precision=None):
  """What `layers.project` stands for."""
  return jnp.einsum(equation, x, kernel, precision=precision)


def compiled(config: Config, project):
  """(step, arguments) with `project` in place of the layers' own."""
  role_of, h = train_step.roles(config), train_step.hyper(config)
  ids = np.random.default_rng(0).integers(0, config.model.V, (B, T + 1))
  batch = {
    'tokens': ids.astype(np.int32),
    'segment_ids': np.ones((B, T + 1), np.int32),
    'positions': np.tile(np.arange(T + 1, dtype=np.int32), (B, 1)),
  }

  def step(state, h, batch):
    return train_step.train_step(config, role_of, state, h, batch)

  with mock.patch.object(layers, 'project', project):
    boxed = jax.jit(lambda h: train_step.init_boxed_state(config, h))(h)
    state = layers.meta.unbox(boxed)
    return jax.jit(step).lower(state, h, batch).compile(), (state, h, batch)


def main() -> None:
  """Prints a line a width."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--rounds', type=int, default=20)
  rounds = parser.parse_args().rounds
  for D, V, mlp in SHAPES:
    model = ModelConfig(D=D, F=4 * D, L=4, N=4, K=2, H=D // 4, V=V, mlp=mlp)
    train = TrainConfig(batch_size=B, seq_len=T, loss_chunk=1024)
    config = Config(model=model, train=train)
    ways = {
      'einsum': compiled(config, einsum),
      'project': compiled(config, layers.project),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
      for name, (step, args) in ways.items():
        begin = time.perf_counter()
        jax.block_until_ready(step(*args))
        if number >= 2:  # the first rounds warm up
          seconds[name].append(time.perf_counter() - begin)
    a, b = (statistics.median(seconds[name]) for name in ways)
    print(f'D {D}, V {V}, {mlp}: einsum / project = {a / b:.2f}')


if __name__ == '__main__':
  main()

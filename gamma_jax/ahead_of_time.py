"""The real train step, compiled for chips that are not here.

The compiler of the chips comes as a package (libtpu, or the CUDA plugin of
JAX) and runs on any machine; JAX itself must run on the CPU. Nothing is
executed, so this says what the program is and what memory it plans, not how
fast it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from gamma_jax import chips, configure, platforms, sharding, train_step
from gamma_jax import program as program_lib
from gamma_jax.config import Config
from gamma_jax.errors import ConfigError

GIB = 2**30
# A package whose presence says that the compiler is there, and its extra.
_COMPILERS = {
  'tpu': (('libtpu',), 'plan-tpu'),
  'gpu': (('jax_cuda12_plugin', 'jax_cuda13_plugin'), 'plan-gpu'),
}
# libtpu asks its surroundings for all of this unless it is told. The type is a
# form to be filled; what is compiled for is the topology.
_TPU_ENVIRONMENT = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-16',
  'TPU_LOG_DIR': 'disabled',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # else two plans at once fail
}
# Public figures of the H100 SXM; a real card says the same of itself.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000
  l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class Step(NamedTuple):
  """A compiled train step.

  Attributes:
    rows: sequences of a micro-batch that a chip holds (tensor parallelism
      apart: chips that share heads share their rows).
    peak: bytes a chip, as the compiler lays them out; None where it refused.
    refusal: why it refused, in its own words, or ''.
  """

  rows: int
  peak: int | None
  refusal: str


def devices(target: chips.Target) -> tuple[jax.Device, ...]:
  """The chips of a target, to compile for.

  Raises:
    ConfigError: the compiler is not installed, does not know the topology, or
      JAX already runs on something else than the CPU here.
  """
  packages, extra = _COMPILERS[target.chip.platform]
  if not any(importlib.util.find_spec(name) for name in packages):
    raise ConfigError(
      f'plan.target={target.name} needs the compiler of these chips: '
      f"pip install 'gamma_jax[{extra}]'"
    )
  platforms.choose('cpu')
  for name, value in _TPU_ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  try:
    if target.chip.platform == 'tpu':
      found = topologies.get_topology_desc(
        platform='tpu', topology_name=target.topology
      )
    else:
      found = topologies.get_topology_desc(
        platform='cuda',
        topology_name='',
        topology=target.topology,
        target_config=_H100,
      )
  except Exception as error:  # each compiler has its own
    text = ' '.join(str(error).split())[:200]
    raise ConfigError(f'plan.target={target.name}: {text}') from error
  return tuple(found.devices)


def compile_step(config: Config, where: tuple[jax.Device, ...]) -> Step:
  """Compiles the train step of `config` for the devices of a target.

  Raises:
    ConfigError: the mesh or the batch does not divide over them.
  """
  configure.check_devices(config, len(where), where[0].platform)
  if config.model.attention == 'cudnn':
    raise ConfigError(
      "model.attention='cudnn' cannot be planned: JAX asks the GPU itself for "
      "its cuDNN; plan with model.attention='blocks', which takes more memory"
    )
  program = program_lib.build(configure.program_key(config), where)
  train = config.train
  batch = jax.ShapeDtypeStruct(
    (train.batch_size, train.seq_len + 1),
    jnp.int32,
    sharding=sharding.batch_sharding(program.mesh),
  )
  everywhere = sharding.replicated(program.mesh)
  hyper = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
    train_step.hyper(config),
  )
  rows = train.batch_size // train.accumulation // row_shards(config, where)
  lowered = program.lower_step(
    hyper, dict.fromkeys(('tokens', 'segment_ids', 'positions'), batch)
  )
  try:
    with _quick_compile():
      memory = lowered.compile().memory_analysis()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    return Step(rows, None, _in_short(error))
  return Step(rows, memory.peak_memory_in_bytes, '')


def row_shards(config: Config, where: tuple[jax.Device, ...]) -> int:
  """Over how many parts the rows of a batch are spread."""
  shape = sharding.mesh_shape(config.mesh, len(where))
  mesh = dict(zip(sharding.AXES, shape, strict=True))
  return math.prod(mesh[axis] for axis in sharding.BATCH_AXES)


def with_rows(
  config: Config, where: tuple[jax.Device, ...], rows: int
) -> Config:
  """`config` with a batch that gives a chip `rows` sequences at once."""
  batch = rows * config.train.accumulation * row_shards(config, where)
  train = dataclasses.replace(config.train, batch_size=batch)
  # check_devices would ask it to divide, and no train step reads it.
  held = dataclasses.replace(config.eval, batch_size=batch)
  return dataclasses.replace(config, train=train, eval=held)


def state_bytes(
  config: Config, where: tuple[jax.Device, ...]
) -> tuple[int, float]:
  """Bytes of weights and moments on one chip, and of an even share of them."""
  program = program_lib.build(configure.program_key(config), where)
  held, total = 0, 0
  for leaf in jax.tree.leaves(program.abstract_state):
    one = leaf.sharding.shard_shape(leaf.shape)
    held += math.prod(one) * leaf.dtype.itemsize
    total += leaf.size * leaf.dtype.itemsize
  return held, total / len(where)


def largest(
  fits: Callable[[int], bool], start: int, tries: int
) -> tuple[int, int | None]:
  """Searches the largest n that fits: doubles, then halves the interval.

  Args:
    fits: costs a compile.
    start: n that is tried first.
    tries: calls of `fits` at most; it also stops within an eighth.

  Returns:
    (the largest n seen to fit, or 0; the smallest n seen not to, or None).
  """
  good, bad, n = 0, None, start
  for _ in range(tries):
    if fits(n):
      good = n
    else:
      bad = n
    if bad is not None and bad - good <= max(1, good // 8):
      break
    n = 2 * good if bad is None else (good + bad) // 2
  return good, bad


def _in_short(error: Exception) -> str:
  text = ' '.join(str(error).split()).removeprefix('RESOURCE_EXHAUSTED: ')
  return re.split(r'(?<=[a-zA-Z)])\. ', text)[0].rstrip('.')[:200]


@contextlib.contextmanager
def _quick_compile() -> Iterator[None]:
  """Least effort: four times as fast, and memory came out equal or larger.

  The cache of compiles is off: it cannot read back what is made for absent
  chips, and warns.
  """
  wanted = {
    'jax_exec_time_optimization_effort': -1.0,
    'jax_enable_compilation_cache': False,
  }
  before = {name: getattr(jax.config, name) for name in wanted}
  for name, value in wanted.items():
    jax.config.update(name, value)
  try:
    yield
  finally:
    for name, value in before.items():
      jax.config.update(name, value)

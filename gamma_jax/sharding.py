"""The mesh and the table from logical axis names to mesh axes.

Axis types are written out as Auto: jax.make_mesh defaults to Explicit, which
Linen's logical partitioning does not survive. Nothing else makes a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import flax.linen as nn
import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from gamma_jax.config import MeshConfig
from gamma_jax.errors import ConfigError

AXES = ('data', 'fsdp', 'tensor', 'expert')

# Dense weights shard over (fsdp, expert) so that expert parallelism does not
# leave them replicated.
BATCH_AXES = ('data', 'fsdp', 'expert')
RULES = (
  ('batch', BATCH_AXES),
  ('length', None),
  ('act_embed', None),
  ('layers', None),
  ('embed', ('fsdp', 'expert')),
  ('vocab', 'tensor'),
  ('heads', 'tensor'),
  ('kv_heads', 'tensor'),
  ('head_dim', None),
  ('mlp', 'tensor'),
  # Expert kernels spend the expert axis on the experts themselves.
  ('expert', 'expert'),
  ('expert_embed', 'fsdp'),
)


def mesh_shape(config: MeshConfig, devices: int) -> tuple[int, ...]:
  """Sizes of AXES, with at most one -1 resolved.

  Raises:
    ConfigError: the sizes do not multiply to the device count.
  """
  sizes = [getattr(config, axis) for axis in AXES]
  free = [i for i, size in enumerate(sizes) if size == -1]
  fixed = math.prod(size for size in sizes if size != -1)
  if len(free) == 1 and devices % fixed == 0:
    sizes[free[0]] = devices // fixed
  if len(free) > 1 or math.prod(sizes) != devices:
    asked = ', '.join(f'{a}={getattr(config, a)}' for a in AXES)
    raise ConfigError(
      f'mesh ({asked}) does not multiply to {devices} devices; '
      'leave one axis at -1'
    )
  return tuple(sizes)


def make_mesh(
  config: MeshConfig, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Builds the device mesh with axes data, fsdp, tensor, expert."""
  devices = jax.devices() if devices is None else devices
  return jax.make_mesh(
    mesh_shape(config, len(devices)),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
    devices=devices,
  )


def devices_for(config: MeshConfig) -> tuple[jax.Device, ...]:
  """Devices of a run: all, but in one process on CPU one of them unless the
  mesh asks for more.

  XLA already spreads one CPU device over all cores, and a result must not
  depend on how many virtual devices a population was given.
  """
  devices = tuple(jax.devices())
  alone = devices[0].platform == 'cpu' and jax.process_count() == 1
  if alone and config == MeshConfig():
    return devices[:1]
  return devices


def population_mesh(devices: Sequence[jax.Device]) -> Mesh:
  """All devices on one axis, over which members of a population lie."""
  return jax.make_mesh(
    (len(devices),), ('pop',), axis_types=(AxisType.Auto,), devices=devices
  )


def axes_in_use(name: str) -> tuple[str, ...]:
  """Mesh axes of several devices over which the rules shard a logical axis.

  None outside a mesh, and none that an enclosing shard_map already took.
  """
  mesh = jax.sharding.get_abstract_mesh()
  axes = nn.logical_to_mesh_axes((name,))[0] or ()
  axes = (axes,) if isinstance(axes, str) else axes
  kinds = dict(zip(mesh.axis_names, mesh.axis_types))
  return tuple(
    a for a in axes if kinds.get(a) == AxisType.Auto and mesh.shape[a] > 1
  )


def tree_shardings(boxed_tree, mesh: Mesh):
  """NamedSharding of every leaf of a boxed (possibly abstract) tree."""
  specs = nn.get_partition_spec(boxed_tree)
  return nn.logical_to_mesh_sharding(specs, mesh, RULES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Rows of a batch over every axis that holds different data."""
  return NamedSharding(mesh, jax.P(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
  """One copy on every device."""
  return NamedSharding(mesh, jax.P())

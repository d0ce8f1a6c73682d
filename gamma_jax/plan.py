"""Whether a run fits its devices, before anything is allocated.

An estimate by arithmetic: the compiler's own number is in ahead_of_time.py.
"""

from __future__ import annotations

import os

import jax

from gamma_jax import flops, sharding
from gamma_jax.config import Config
from gamma_jax.errors import ConfigError

# Left for the runtime, the compiler's temporaries and what we do not count.
USABLE = 0.9
GIB = 2**30


def device_memory() -> int:
  """Bytes one device may use: its limit, or on CPU its share of free RAM."""
  device = jax.local_devices()[0]
  stats = device.memory_stats()
  if stats and 'bytes_limit' in stats:
    return stats['bytes_limit']
  if device.platform == 'cpu':
    free = os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    free = max(free, _available())
    return free // jax.local_device_count()
  raise ConfigError(f'{device} does not tell its memory limit')


def total_memory() -> int:
  """Like `device_memory`, but of the whole machine on CPU: the same number in
  every call, so that what is decided by it does not change on a restart."""
  if jax.local_devices()[0].platform != 'cpu':
    return device_memory()
  total = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  return total // jax.local_device_count()


def _available() -> int:
  # Page cache counts as used in SC_AVPHYS_PAGES but is given back on demand.
  try:
    with open('/proc/meminfo') as lines:
      for line in lines:
        if line.startswith('MemAvailable:'):
          return int(line.split()[1]) * 1024
  except OSError:
    pass
  return 0


def check_fits(config: Config, limit: int | None = None) -> None:
  """Refuses a run that cannot fit, with the numbers and a way out.

  Args:
    config: one cell.
    limit: bytes per device; None asks the device.

  Raises:
    ConfigError: the estimate passes USABLE of the limit.
  """
  devices = jax.device_count()
  need = bytes_per_device(config, devices)
  total = sum(need.values())
  limit = device_memory() if limit is None else limit
  if total <= USABLE * limit:
    return
  items = ', '.join(f'{k} {v / GIB:.1f}' for k, v in need.items())
  raise ConfigError(
    f'{config.size or "this model"} needs about {total / GIB:.1f} GiB a device '
    f'({items}) and {jax.local_devices()[0].device_kind} x {devices} has '
    f'{limit / GIB:.1f} GiB: use more devices (--config.mesh.fsdp=N), a smaller'
    ' --config.train.batch_size or --config.train.accumulation=N, or run '
    '--config=configs/sweep_tiny.py; --mode=plan prints every cell'
  )


def bytes_per_device(config: Config, devices: int) -> dict[str, int]:
  """Itemised estimate: weights and moments sharded, activations by batch."""
  shape = dict(
    zip(sharding.AXES, sharding.mesh_shape(config.mesh, devices), strict=True)
  )
  return flops.train_bytes(
    config,
    weight_shards=shape['fsdp'] * shape['tensor'] * shape['expert'],
    batch_shards=shape['data'] * shape['fsdp'] * shape['expert'],
    expert_shards=shape['expert'],
  )

"""The platform that JAX runs on: the one asked for, or an error."""

from __future__ import annotations

import os
from pathlib import Path

from gamma_jax.errors import ConfigError


def cache_compiles(folder: str) -> None:
  """Keeps compiled programs in `folder` for the next process; '' does not.

  An environment that names a cache of its own is left alone.
  """
  import jax

  if not folder or os.environ.get('JAX_COMPILATION_CACHE_DIR'):
    return
  path = str(Path(folder).expanduser())
  jax.config.update('jax_compilation_cache_dir', path)
  # JAX's own thresholds would skip the small programs that most cells are.
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)


def split_cpu(count: int | None = None) -> None:
  """Makes the CPU `count` devices (None: one a core) for a population.

  Must come before the first use of JAX; after it, or if XLA_FLAGS already
  says how many, nothing changes.
  """
  import jax

  if 'xla_force_host_platform_device_count' in os.environ.get('XLA_FLAGS', ''):
    return
  count = count or len(os.sched_getaffinity(0))
  try:
    jax.config.update('jax_num_cpu_devices', count)
  except RuntimeError:  # a backend is up already: a notebook, say
    pass


def choose(platform: str) -> str:
  """Makes JAX use `platform` and returns what it has, as `gpu: 4 x NVIDIA L4`.

  Args:
    platform: cpu, gpu or tpu; '' takes what JAX finds.

  Raises:
    ConfigError: JAX has another one. Alone it would go on with the CPU.
  """
  import jax  # late: bad input must not wait for it

  try:
    if platform == 'cpu':
      # Before the first use, so that no accelerator is taken. Not for the
      # others: `gpu` would ask for every brand of GPU.
      jax.config.update('jax_platforms', 'cpu')
    devices = jax.devices()
  except (RuntimeError, AssertionError) as error:  # the latter says nothing
    text = ' '.join(str(error).split()) or 'check JAX_PLATFORMS'
    raise ConfigError(f'JAX finds no device: {text}') from error
  found = jax.default_backend()
  text = f'{found}: {len(devices)} x {devices[0].device_kind}'
  if platform not in ('', found):
    raise ConfigError(
      f'platform={platform!r} is not what JAX runs on here ({text}); check the '
      'driver, the installed jaxlib and JAX_PLATFORMS, or take '
      f'--config.platform={found}'
    )
  return text

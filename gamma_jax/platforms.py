"""The platform that JAX runs on: the one asked for, or an error."""

from __future__ import annotations

from gamma_jax.errors import ConfigError


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

"""What every test stands on. Set before anything imports jax.

Environment variables rather than jax.config, so that processes started by
tests (resume, command line) inherit them.
"""

import os
import pathlib
import sys

import pytest

if 'jax' in sys.modules:
  raise RuntimeError('jax was imported before tests/conftest.py set it up')

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_DEVICES = '--xla_force_host_platform_device_count=8'

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
if _DEVICES not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_DEVICES}'
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'
os.environ['HF_HUB_OFFLINE'] = '1'  # a test must not wait for a network
# Compiling is most of the time of a test; the second run finds it done.
os.environ['JAX_COMPILATION_CACHE_DIR'] = str(_ROOT / '.pytest_cache' / 'xla')
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'


def pytest_collection_modifyitems(items):
  """Skips GPU tests unless JAX_PLATFORMS asks for another platform."""
  if os.environ['JAX_PLATFORMS'] != 'cpu':
    return
  for item in items:
    if item.get_closest_marker('gpu'):
      item.add_marker(pytest.mark.skip(reason='JAX_PLATFORMS is cpu'))

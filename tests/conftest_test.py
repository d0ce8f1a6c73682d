"""The footing of all tests is what conftest.py says."""

import os
import pathlib

import jax
import jax.numpy as jnp
import pytest


def test_eight_devices():
  if os.environ['JAX_PLATFORMS'] != 'cpu':
    pytest.skip('not on the CPU')
  assert jax.device_count() == 8


def test_rank_promotion_raises():
  with pytest.raises(ValueError, match='rank_promotion'):
    jnp.ones((2, 3)) + jnp.ones(3)


def test_compiled_programs_are_kept():
  # However quickly they compile (jax's default keeps slow ones only).
  jax.jit(lambda x: x * 3.0)(1.0).block_until_ready()
  folder = pathlib.Path(jax.config.jax_compilation_cache_dir)
  assert any(folder.glob('jit_*'))

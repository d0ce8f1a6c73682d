"""gamma_normal against closed forms, JAX's own initializers and the traps."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gamma_jax import initializers

KEY = jax.random.key(0)


def std_of(init, shape, **kwargs):
  return float(jnp.std(init(KEY, shape, **kwargs)))


@pytest.mark.parametrize('distribution', initializers.DISTRIBUTIONS)
@pytest.mark.parametrize('gamma', [0.3, 0.5, 0.75, 1.0, 1.25])
def test_realised_std_is_the_rule_within_one_percent(gamma, distribution):
  init = initializers.gamma_normal(gamma, 0, 1, distribution=distribution)
  assert std_of(init, (512, 512)) == pytest.approx(512**-gamma, rel=0.01)


def test_truncated_draw_stays_inside_its_bounds():
  init = initializers.gamma_normal(0.5, 0, 1, distribution='truncated_normal')
  w = init(KEY, (256, 1024)) * 16
  assert float(jnp.max(jnp.abs(w))) <= 2 / 0.8796 * 1.001


@pytest.mark.parametrize('shape', [(256, 128), (300, 70)])
def test_gamma_half_equals_variance_scaling(shape):
  ours = initializers.gamma_normal(0.5, 0, 1)(KEY, shape)
  theirs = jax.nn.initializers.variance_scaling(1.0, 'fan_in', 'normal')(
    KEY, shape, jnp.float32
  )
  np.testing.assert_allclose(ours, theirs, rtol=2e-7)


def test_gamma_half_is_bitwise_variance_scaling_where_the_root_is_exact():
  ours = initializers.gamma_normal(0.5, 0, 1)(KEY, (256, 64))
  theirs = jax.nn.initializers.variance_scaling(1.0, 'fan_in', 'normal')(
    KEY, (256, 64), jnp.float32
  )
  np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize('distribution', initializers.DISTRIBUTIONS)
def test_other_gamma_is_an_exact_rescaling_of_the_same_draw(distribution):
  def draw(gamma):
    init = initializers.gamma_normal(gamma, 0, 1, distribution=distribution)
    return np.asarray(init(KEY, (256, 64)))

  # 256^-0.5 and 256^-1 are powers of two: the ratio is exact.
  np.testing.assert_array_equal(draw(0.5), draw(1.0) * 16)


def test_traced_gamma_equals_python_gamma_and_compiles_once():
  traces = []

  @jax.jit
  def draw(gamma):
    traces.append(gamma)
    return initializers.gamma_normal(gamma, 0, 1)(KEY, (300, 64))

  for gamma in (0.5, 0.75, 1.0):
    fixed = initializers.gamma_normal(gamma, 0, 1)(KEY, (300, 64))
    np.testing.assert_allclose(draw(jnp.float32(gamma)), fixed, rtol=2e-6)
  assert len(traces) == 1


def test_heads_do_not_shrink_fan_in():
  # The popular rule 'input axis is -2' sees 8 instead of 512: 8x at gamma 1.
  query = initializers.gamma_normal(1.0, 0, (1, 2))
  assert std_of(query, (512, 8, 64)) == pytest.approx(1 / 512, rel=0.01)
  output = initializers.gamma_normal(1.0, (0, 1), 2)
  assert std_of(output, (8, 64, 512)) == pytest.approx(1 / 512, rel=0.01)


def test_stacks_and_experts_do_not_enter_fan_in():
  init = initializers.gamma_normal(0.5, 1, 2, batch_axis=0)
  w = init(KEY, (8, 512, 256))
  np.testing.assert_allclose(jnp.std(w, axis=(1, 2)), 512**-0.5, rtol=0.01)


def test_embedding_fan_in_is_the_width_not_the_vocabulary():
  init = initializers.gamma_normal(1.0, in_axis=1, out_axis=0)
  assert std_of(init, (4096, 128)) == pytest.approx(1 / 128, rel=0.01)


def test_half_precision_is_drawn_in_float32_and_cast_last():
  init = initializers.gamma_normal(0.5, 0, 1)
  half = init(KEY, (1024, 2048), jnp.bfloat16)
  full = init(KEY, (1024, 2048), jnp.float32)
  assert half.dtype == jnp.bfloat16 and full.dtype == jnp.float32
  np.testing.assert_array_equal(half, full.astype(jnp.bfloat16))
  # A draw made in bfloat16 never passes 2.9 std.
  assert float(jnp.max(jnp.abs(half.astype(jnp.float32)))) * 32 > 4


@pytest.mark.parametrize('gamma', [float('nan'), float('inf')])
def test_gamma_that_is_no_number_is_an_error(gamma):
  with pytest.raises(ValueError, match='gamma must be finite'):
    initializers.gamma_normal(gamma, 0, 1)


def test_unknown_distribution_is_an_error():
  with pytest.raises(ValueError, match='uniform'):
    initializers.gamma_normal(1.0, 0, 1, distribution='uniform')


def test_unnamed_axis_is_an_error():
  with pytest.raises(ValueError, match='exactly once'):
    initializers.gamma_normal(1.0, 0, 1)(KEY, (4, 8, 16))


@pytest.mark.parametrize('std', [float('nan'), -0.1, float('inf')])
def test_bad_std_is_an_error(std):
  with pytest.raises(ValueError, match='std must be'):
    initializers.scaled_normal(std)


def test_import_pulls_in_jax_alone():
  code = (
    'import sys; from gamma_jax import gamma_normal;'
    "heavy = {'flax', 'orbax', 'grain', 'tensorflow_datasets', 'optax'};"
    'print(sorted(heavy & set(sys.modules)))'
  )
  out = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert out.stdout.strip() == '[]'

"""Kernels of accelerators against the portable attention that they replace.

A compiled kernel cannot run here. Splash runs in Pallas' interpreter; of cuDNN
the lowered program is read, and its mask is checked through XLA.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from gamma_jax import (
  attend,
  configure,
  kernels,
  program,
  sharding,
  train_step,
  trainer,
)
from gamma_jax.config import Config, MeshConfig, ModelConfig, TrainConfig
from gamma_jax.errors import ConfigError

B, T, N, K, H = 4, 200, 4, 2, 16  # T is no multiple of a tile


def inputs(dtype=jnp.float32, T=T):
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = [(B, T, heads, H) for heads in (N, K, K, N)]
  return [
    jax.random.normal(key, shape, dtype)
    for key, shape in zip(keys, shapes, strict=True)
  ]


def packed(T=T):
  """One document; three; padding around one; padding alone."""
  segments = np.ones((B, T), np.int32)
  segments[1, 50:130] = 2
  segments[1, 130:] = 3
  segments[2, :20] = segments[2, -33:] = 0
  segments[3] = 0
  return segments


def value_and_gradients(fn, q, k, v, weight, segments):
  """Output, and gradients of sum(weight * output) to q, k and v."""

  def total(qkv):
    out = fn(*qkv, segments)
    return jnp.sum(out.astype(jnp.float32) * weight), out

  (_, out), grads = jax.value_and_grad(total, has_aux=True)((q, k, v))
  return out, *grads


PORTABLE = functools.partial(attend.attend, block=64)
SPLASH = functools.partial(kernels.splash, interpret=True)
CUDNN = functools.partial(kernels.cudnn, implementation='xla')


@functools.cache
def portable():
  fn = jax.jit(functools.partial(value_and_gradients, PORTABLE))
  return fn(*inputs(), packed())


def assert_portable(got):
  pad = packed() == 0
  for x, want in zip(got, portable(), strict=True):
    np.testing.assert_allclose(
      x, want, rtol=1e-5, atol=1e-5 * np.abs(want).max()
    )
    assert not np.any(np.asarray(x)[pad])


@pytest.mark.parametrize('fn', [SPLASH, CUDNN], ids=['splash', 'cudnn'])
def test_equals_the_portable_one_in_values_and_gradients(fn):
  got = jax.jit(functools.partial(value_and_gradients, fn))(*inputs(), packed())
  assert_portable(got)


@pytest.mark.multi_device
def test_splash_over_devices_stays_where_its_rows_and_heads_are():
  mesh = sharding.make_mesh(
    MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4]
  )
  heads = jax.NamedSharding(mesh, jax.P(sharding.BATCH_AXES, None, 'tensor'))

  def fn(*args):
    return value_and_gradients(kernels.over_devices(SPLASH), *args)

  args = [jax.device_put(x, heads) for x in inputs()]
  ids = jax.device_put(packed(), sharding.batch_sharding(mesh))
  one_program = jax.jit(fn, out_shardings=(heads,) * 4)
  run = functools.partial(program.in_mesh, mesh)
  compiled = run(one_program.lower)(*args, ids).compile()
  # Sums over mesh axes of one device are left: no group has two.
  groups = re.findall(r'replica_groups=(\S+?),? ', compiled.as_text())
  assert not {g.strip(',') for g in groups} - {'{{0},{1},{2},{3}}'}
  assert_portable(compiled(*args, ids))


def lowered_step(platform, **model):
  """The train step as a program for a platform that is not here."""
  shape = ModelConfig(D=64, F=64, L=2, N=2, K=1, H=64, V=64, **model)
  config = Config(
    model=shape, train=TrainConfig(batch_size=2, seq_len=128, loss_chunk=128)
  )
  made = program.build(config, (jax.devices()[0],))
  rows = jax.ShapeDtypeStruct((2, 129), jnp.int32)
  batch = dict.fromkeys(('tokens', 'segment_ids', 'positions'), rows)
  traced = made.in_mesh(made.step.__wrapped__.trace)(
    made.abstract_state, train_step.hyper(config), batch
  )
  return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(('attention', 'calls'), [('blocks', 0), ('splash', 3)])
def test_the_train_step_of_a_tpu_has_the_kernel_that_is_named(attention, calls):
  # Forward, and backward to q and to k and v; one scan body holds all layers.
  text = lowered_step('tpu', attention=attention)
  assert text.count('@tpu_custom_call') == calls


def test_the_train_step_of_a_gpu_has_the_kernel_that_is_named(monkeypatch):
  # JAX asks the machine for its cuDNN already when it traces.
  monkeypatch.setattr(
    fused_attention_stablehlo, 'check_cudnn_version', lambda: 91000
  )
  text = lowered_step('cuda', attention='cudnn', dtype='bfloat16', remat='full')
  assert '__cudnn$fmhaScaleBiasSoftmax(' in text
  assert '__cudnn$fmhaScaleBiasSoftmaxBackward(' in text


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'attention': 'flash'}, "'flash' is not one of 'blocks', 'splash', 'cud"),
    ({'attention': 'cudnn'}, "needs model.dtype='bfloat16', not 'float32'"),
    ({'attention': 'cudnn', 'dtype': 'bfloat16', 'H': 12}, 'a model.H of 8'),
    ({'attention': 'cudnn', 'dtype': 'bfloat16', 'H': 256}, 'a model.H of 8'),
  ],
)
def test_what_a_kernel_cannot_do_is_refused(changes, message):
  with pytest.raises(ConfigError, match=message):
    configure.validate(configure.resolve({'model': changes}))


def test_an_odd_length_is_refused_by_cudnn_alone():
  nested = {
    'train': {'seq_len': 129},
    'model': {'attention': 'splash', 'dtype': 'bfloat16'},
  }
  configure.validate(configure.resolve(nested))
  nested['model']['attention'] = 'cudnn'
  with pytest.raises(ConfigError, match='an even train.seq_len, not 129'):
    configure.validate(configure.resolve(nested))


@pytest.mark.parametrize(
  ('attention', 'right', 'wrong'),
  [('splash', 'tpu', 'cpu'), ('splash', 'tpu', 'gpu'), ('cudnn', 'gpu', 'tpu')],
)
def test_a_kernel_of_another_platform_is_refused(attention, right, wrong):
  shape = ModelConfig(attention=attention, dtype='bfloat16')
  message = f'{attention!r} runs on a {right.upper()}, not on {wrong}'
  configure.check_devices(Config(model=shape), 1, right)
  configure.validate(Config(model=shape, platform=right))
  with pytest.raises(ConfigError, match=message):
    configure.check_devices(Config(model=shape), 1, wrong)
  with pytest.raises(ConfigError, match=message):
    configure.validate(Config(model=shape, platform=wrong))


def test_a_run_with_a_kernel_that_is_not_here_ends_before_it_starts(tmp_path):
  config = Config(model=ModelConfig(attention='splash'))
  with pytest.raises(ConfigError, match='runs on a TPU, not on cpu'):
    trainer.train(config, tmp_path / 'cell')
  assert not (tmp_path / 'cell').exists()

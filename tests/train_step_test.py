"""One update: accumulation by tokens, pairing, one compile, sharding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gamma_jax import configure, train_step
from gamma_jax import program as program_lib
from gamma_jax.config import (
  Config,
  InitConfig,
  ModelConfig,
  OptConfig,
  TrainConfig,
)

MODEL = ModelConfig(D=32, F=64, L=2, N=4, K=2, H=8, V=64)
CONFIG = Config(
  model=MODEL,
  opt=OptConfig(lr=1e-2, warmup_steps=2),
  train=TrainConfig(steps=20, batch_size=8, seq_len=16, loss_chunk=32),
)
ONE = (jax.devices()[0],)


def rows(seed=0, B=8, T=16, lengths=None):
  """Packed rows of one document each, padded after `lengths[b]` tokens."""
  tokens = np.random.default_rng(seed).integers(1, 64, (B, T + 1))
  lengths = np.full(B, T + 1) if lengths is None else np.asarray(lengths)
  real = np.arange(T + 1)[None] < lengths[:, None]
  return {
    'tokens': np.where(real, tokens, 0).astype(np.int32),
    'segment_ids': real.astype(np.int32),
    'positions': np.tile(np.arange(T + 1, dtype=np.int32), (B, 1)),
  }


def program(config, devices=ONE):
  return program_lib.build(configure.program_key(config), devices)


def run(config, n=1, devices=ONE, **kwargs):
  p = program(config, devices)
  h = train_step.hyper(config)
  state, lines = p.init(config), []
  for i in range(n):
    state, out = p.step(state, h, p.put_batch(rows(i, **kwargs)))
    lines.append(jax.device_get(out))
  return state, lines


def replaced(section, **changes):
  return dataclasses.replace(
    CONFIG,
    **{section: dataclasses.replace(getattr(CONFIG, section), **changes)},
  )


def assert_close(a, b, rtol):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    x, y = np.asarray(x), np.asarray(y)
    np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(x).max())


@pytest.mark.parametrize(
  'accumulation', [2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_accumulation_weighs_tokens_not_micro_batches(accumulation):
  batch = train_step.split_labels(rows(lengths=[3, 17, 5, 2, 17, 9, 4, 3]))
  h = train_step.hyper(CONFIG)
  params = program(CONFIG).init(CONFIG).params
  split = replaced('train', accumulation=accumulation)
  whole, sums = train_step.mean_gradient(CONFIG, h, params, batch, {})
  parts, part_sums = train_step.mean_gradient(split, h, params, batch, {})
  assert (
    int(sums.tokens)
    == int(part_sums.tokens)
    == 3 + 17 * 2 + 5 + 2 + 9 + 4 + 3 - 8
  )
  assert_close(whole, parts, 1e-5)


def test_labels_stay_inside_documents_and_skip_padding():
  batch = {
    'tokens': np.array([[7, 8, 9, 7, 5, 0, 0]], np.int32),
    'segment_ids': np.array([[1, 1, 1, 2, 2, 0, 0]], np.int32),
    'positions': np.array([[0, 1, 2, 0, 1, 0, 0]], np.int32),
  }
  out = train_step.split_labels(batch)
  np.testing.assert_array_equal(out['mask'], [[1, 1, 0, 1, 0, 0]])
  np.testing.assert_array_equal(out['labels'], [[8, 9, 7, 5, 0, 0]])


def test_a_sweep_at_one_shape_compiles_the_train_step_once(monkeypatch):
  # Its own width, so that no other test has compiled this program.
  base = replaced('model', D=40)
  traced = []
  original = train_step.train_step

  def counted(*args):
    traced.append(1)
    return original(*args)

  monkeypatch.setattr(train_step, 'train_step', counted)
  seen = set()
  for change in (
    {},
    {'seed': 3},
    {'init': InitConfig(gamma=0.5)},
    {'init': InitConfig(rule='xavier', depth_scale=True)},
    {'model': dataclasses.replace(base.model, norm_eps=1e-5)},
    {'opt': dataclasses.replace(base.opt, lr=1e-3)},
    {'opt': dataclasses.replace(base.opt, weight_decay=0.0)},
  ):
    _, lines = run(dataclasses.replace(base, **change), n=2)
    last = lines[1]
    seen.add((float(last['train/loss']), float(last['opt/param_norm'])))
  assert len(traced) == 1
  assert len(seen) == 7, 'a traced number had no effect'


def test_arms_of_one_seed_start_from_the_same_draw():
  p = program(CONFIG)
  arms = [replaced('init', gamma=g) for g in (0.5, 1.0)]
  a, b = (p.init(arm).params for arm in arms)
  q = ('blocks', 'attn', 'q', 'kernel')
  for key in q:
    a, b = a[key], b[key]
  np.testing.assert_allclose(a, b * np.float32(32**0.5), rtol=1e-6)


def test_loss_at_step_zero_is_that_of_uniform_prediction():
  _, lines = run(CONFIG)
  assert lines[0]['train/loss'] == pytest.approx(np.log(64), abs=0.02)


def test_training_lowers_the_loss_on_a_fixed_batch():
  p, h = program(CONFIG), train_step.hyper(CONFIG)
  state = p.init(CONFIG)
  seen = []
  for _ in range(20):
    state, out = p.step(state, h, p.put_batch(rows(0)))
    seen.append(float(out['train/loss']))
  assert seen[-1] < seen[0] - 0.5


def test_logged_rate_counts_updates_not_micro_batches():
  _, one = run(CONFIG, n=5)
  _, four = run(replaced('train', accumulation=4), n=5)
  rate = [x['opt/lr'] for x in one]
  np.testing.assert_array_equal(rate, [x['opt/lr'] for x in four])
  assert rate[0] == pytest.approx(0.005) and rate[1] == pytest.approx(0.01)


def test_z_loss_changes_the_update_but_not_the_reported_loss():
  _, plain = run(CONFIG)
  _, with_z = run(replaced('train', z_loss=0.1))
  assert plain[0]['train/loss'] == with_z[0]['train/loss']
  assert plain[0]['opt/grad_norm'] != with_z[0]['opt/grad_norm']


@pytest.mark.parametrize('param_dtype', ['float32', 'bfloat16'])
def test_moments_are_float32_and_finite_for_unused_rows(param_dtype):
  config = replaced('model', param_dtype=param_dtype, dtype='bfloat16')
  state, lines = run(config, n=2)
  assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {param_dtype}
  moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
  assert {str(x.dtype) for x in moments} == {'float32'}
  for x in jax.tree.leaves(state):
    assert np.all(np.isfinite(np.asarray(x, np.float32)))


def test_eight_devices_equal_one():
  many = tuple(jax.devices()[:8])
  _, one = run(CONFIG, n=3)
  _, eight = run(CONFIG, n=3, devices=many)
  for name in ('train/loss', 'opt/grad_norm', 'train/tokens'):
    np.testing.assert_allclose(
      [x[name] for x in one], [x[name] for x in eight], rtol=1e-5
    )


def test_initial_parameters_are_bitwise_equal_on_any_device_count():
  many = tuple(jax.devices()[:8])
  one = program(CONFIG).init(CONFIG)
  mesh = dataclasses.replace(CONFIG.mesh, fsdp=2)
  eight = program(dataclasses.replace(CONFIG, mesh=mesh), many).init(CONFIG)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(eight), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_rms_by_role_is_the_rms_of_the_new_parameters():
  state, lines = run(CONFIG)
  mlp = [
    np.ravel(state.params['blocks']['mlp'][name]['kernel'])
    for name in ('up', 'gate', 'down')
  ]
  want = np.sqrt(np.mean(np.square(np.concatenate(mlp))))
  assert lines[0]['rms/params/mlp'] == pytest.approx(want, rel=1e-5)
  assert jnp.isfinite(lines[0]['opt/update_norm'])

"""The experts inside the model: what they are made of and how they train."""

import dataclasses
import functools

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from gamma_jax import (
  checkpoint,
  configure,
  init_rules,
  layers,
  mlp,
  model,
  moe,
  train_step,
)
from gamma_jax import program as program_lib
from gamma_jax.config import (
  CheckpointConfig,
  Config,
  InitConfig,
  InitOverrides,
  ModelConfig,
  MoeConfig,
  OptConfig,
  TrainConfig,
)

MODEL = ModelConfig(
  D=16,
  F=24,
  L=2,
  N=4,
  K=2,
  H=4,
  V=64,
  moe=MoeConfig(experts=4, block=8, load_balance=0.1, router_z=0.1),
)
CONFIG = Config(
  model=MODEL,
  init=InitConfig(gamma=0.5),
  opt=OptConfig(lr=1e-2, warmup_steps=2),
  train=TrainConfig(steps=20, batch_size=8, seq_len=16, loss_chunk=32),
)
ONE = (jax.devices()[0],)


def replaced(config=CONFIG, **changes):
  """replaced(moe={'top_k': 1}, train={...})."""
  experts = dataclasses.replace(config.model.moe, **changes.pop('moe', {}))
  shape = changes.pop('model', {}) | {'moe': experts}
  for section, values in (changes | {'model': shape}).items():
    values = dataclasses.replace(getattr(config, section), **values)
    config = dataclasses.replace(config, **{section: values})
  return config


def rows(seed=0, B=8, T=16, lengths=(17, 3, 17, 9, 5, 17, 12, 17)):
  tokens = np.random.default_rng(seed).integers(1, 64, (B, T + 1))
  real = np.arange(T + 1)[None] < np.asarray(lengths)[:, None]
  return {
    'tokens': np.where(real, tokens, 0).astype(np.int32),
    'segment_ids': real.astype(np.int32),
    'positions': np.tile(np.arange(T + 1, dtype=np.int32), (B, 1)),
  }


def program(config, devices=ONE):
  return program_lib.build(configure.program_key(config), devices)


def run(config, n=1, devices=ONE, state=None, start=0):
  p, h = program(config, devices), train_step.hyper(config)
  state = p.init(config) if state is None else state
  lines = []
  for i in range(start, start + n):
    state, out = p.step(state, h, p.put_batch(rows(i)))
    lines.append(jax.device_get(out))
  return state, lines


@functools.partial(jax.jit, static_argnums=0)
def gradient(config, params, batch):
  batch = train_step.split_labels(batch)
  h = train_step.hyper(config)
  state = moe.initial_state(config.model)
  return train_step.mean_gradient(config, h, params, batch, state)


@functools.cache
def params(config=CONFIG):
  return program(config).init(config).params


def close(a, b, rtol=1e-5):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    x, y = np.asarray(x), np.asarray(y)
    np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(y).max())


# --- The layer ---------------------------------------------------------------


def layer(config, x, gamma=0.5):
  rule = init_rules.make_rule(InitConfig(gamma=gamma), config)
  net = moe.Moe(config, rule)
  mask = jnp.ones(x.shape[:2], bool)
  weights = jax.jit(net.init)(jax.random.key(0), x, mask)['params']
  weights = meta.unbox(weights)
  return net, weights, jax.jit(functools.partial(net.apply, mask=mask))


def normal(*shape):
  x = np.random.default_rng(0).normal(size=shape)
  return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize('kind', ['swiglu', 'gelu'])
def test_one_expert_is_the_dense_mlp(kind):
  c = replaced(moe={'experts': 1, 'top_k': 1}, model={'mlp': kind}).model
  x = normal(2, 10, 16)
  net, weights, apply = layer(c, x)
  y, stats = apply({'params': weights}, x)
  dense = jax.tree.map(lambda w: w[0], dict(weights, router={}))
  del dense['router']
  want = mlp.Mlp(c, net.rule).apply({'params': dense}, x)
  close(y, want)
  assert float(stats.balance) == 1.0


def test_equal_experts_are_the_dense_mlp_plus_the_shared_one():
  c = replaced(moe={'shared': 1}).model
  x = normal(2, 10, 16)
  net, weights, apply = layer(c, x)
  shared = weights['shared']
  for name in ('up', 'gate', 'down'):
    kernel = shared[name]['kernel']
    weights[name]['kernel'] = jnp.tile(kernel[None], (4, 1, 1))
  y, _ = apply({'params': weights}, x)
  close(y, 2 * mlp.Mlp(c, net.rule).apply({'params': shared}, x))


def test_a_token_gets_the_weighted_sum_of_its_experts():
  c = MODEL
  x = normal(1, 6, 16)
  net, weights, apply = layer(c, x)
  y, _ = apply({'params': weights}, x)
  logits = np.asarray(x[0] @ weights['router']['kernel'], np.float64)
  for t in range(6):
    best = np.argsort(-logits[t])[:2]
    w = np.exp(logits[t, best]) / np.exp(logits[t, best]).sum()
    one = [
      mlp.Mlp(c, net.rule).apply(
        {
          'params': {
            name: {'kernel': weights[name]['kernel'][e]}
            for name in ('up', 'gate', 'down')
          }
        },
        x[:, t : t + 1],
      )
      for e in best
    ]
    close(y[:, t : t + 1], w[0] * one[0] + w[1] * one[1])


def test_router_stays_float32_under_bfloat16():
  c = dataclasses.replace(MODEL, dtype='bfloat16', param_dtype='bfloat16')
  x = normal(1, 64, 16).astype('bfloat16')
  _, weights, apply = layer(c, x)
  y, stats = apply({'params': weights}, x)
  assert y.dtype == jnp.bfloat16 and stats.balance.dtype == jnp.float32
  logits = x[0].astype('float32') @ weights['router']['kernel'].astype(
    'float32'
  )
  z = np.square(np.asarray(jax.nn.logsumexp(logits, axis=-1))).sum()
  assert float(stats.z_sum) == pytest.approx(z, rel=1e-6)


# --- Initialization ----------------------------------------------------------

SHAPE = ModelConfig(
  D=64, F=96, L=2, N=4, K=2, H=16, V=128, moe=MoeConfig(experts=8, shared=1)
)
FAN_IN = {
  'blocks/moe/router/kernel': ('router', 64),
  'blocks/moe/up/kernel': ('expert_up', 64),
  'blocks/moe/gate/kernel': ('expert_gate', 64),
  'blocks/moe/down/kernel': ('expert_down', 96),
  'blocks/moe/shared/up/kernel': ('up', 64),
  'blocks/moe/shared/gate/kernel': ('mlp_gate', 64),
  'blocks/moe/shared/down/kernel': ('down', 96),
}


@functools.cache
def draw(config=SHAPE, **init):
  net = model.Transformer(
    config, init_rules.make_rule(InitConfig(**init), config)
  )
  tokens = jnp.zeros((1, 1), jnp.int32)
  boxed = jax.jit(net.init)(jax.random.key(0), tokens, tokens, tokens)
  found = layers.declarations(boxed['params'])
  return {p: d for p, d in found.items() if p.startswith('blocks/moe/')}


@pytest.mark.parametrize('gamma', [0.5, 1.0])
def test_every_expert_of_every_layer_has_the_std_of_its_own_fan_in(gamma):
  found = draw(gamma=gamma)
  assert {p: (d.kind, d.fan_in) for p, d in found.items()} == FAN_IN
  for path, d in found.items():
    value = np.asarray(d.value)
    for one in value.reshape(-1, *value.shape[-2:]):
      z = (one.std() / d.fan_in**-gamma - 1) * (2 * one.size) ** 0.5
      assert abs(z) < 4.5, (path, z)  # sampling error of a std, in sigmas


def test_experts_start_different():
  up = np.asarray(draw(gamma=1.0)['blocks/moe/up/kernel'].value)
  assert len({x.tobytes() for x in up.reshape(-1, 64, 96)}) == 16


@pytest.mark.parametrize(
  'init, paths, factor',
  [
    ({'depth_scale': True}, ('down', 'shared/down'), 0.5),
    ({'down_fan_in': 'model'}, ('down', 'shared/down'), 96 / 64),
    ({'overrides': InitOverrides(router=0.5)}, ('router',), 8),
  ],
)
def test_an_option_changes_exactly_what_it_names(init, paths, factor):
  base, other = draw(gamma=1.0), draw(gamma=1.0, **init)
  paths = {f'blocks/moe/{p}/kernel' for p in paths}
  for path, d in base.items():
    ratio = factor if path in paths else 1.0
    close(other[path].value, np.asarray(d.value) * ratio)


def test_small_weights_leave_no_expert_idle_at_the_start():
  # At gamma 1 the logits are nearly equal; ties must not fill experts 0 .. k.
  c = replaced(
    init={'gamma': 1.0},
    model={'D': 128, 'V': 512},
    moe={'experts': 8},
    train={'batch_size': 4, 'seq_len': 512},
  )
  tokens = np.random.default_rng(0).integers(0, 512, (4, 513), dtype=np.int32)
  batch = {
    'tokens': tokens,
    'segment_ids': np.ones_like(tokens),
    'positions': np.tile(np.arange(513, dtype=np.int32), (4, 1)),
  }
  _, out = program(c).step(
    program(c).init(c), train_step.hyper(c), program(c).put_batch(batch)
  )
  assert out['moe/dead_experts'] == 0
  assert 1 <= out['moe/max_load'] < 1.5
  assert out['moe/load_balance'] == pytest.approx(1, abs=0.01)
  assert out['moe/router_z'] == pytest.approx(np.log(8) ** 2, rel=0.02)


# --- The update --------------------------------------------------------------


@pytest.mark.parametrize(
  'change',
  [
    {'model': {'scan': False}, 'moe': {'dispatch': 'ragged'}},
    {'model': {'remat': 'full'}},
    {'model': {'remat': 'dots'}, 'moe': {'dispatch': 'dense'}},
  ],
)
def test_how_it_is_computed_changes_no_gradient_and_no_report(change):
  grads, sums = gradient(CONFIG, params(), rows())
  other, other_sums = gradient(replaced(**change), params(), rows())
  close(other, grads)
  close(other_sums, sums)


@pytest.mark.slow
def test_accumulation_weighs_tokens():
  # z-loss and load are sums: exactly those of the whole batch.
  linear = replaced(moe={'load_balance': 0.0})
  parts = replaced(linear, train={'accumulation': 4})
  whole, sums = gradient(linear, params(), rows())
  split, split_sums = gradient(parts, params(), rows())
  close(split, whole)
  np.testing.assert_array_equal(split_sums.moe.load, sums.moe.load)
  close(split_sums.moe.z_sum, sums.moe.z_sum)


@pytest.mark.slow
def test_balance_of_parts_is_weighted_by_their_tokens():
  batch = rows()
  grads, sums = gradient(replaced(train={'accumulation': 2}), params(), batch)
  halves = [
    gradient(CONFIG, params(), {k: v[i::2] for k, v in batch.items()})
    for i in range(2)
  ]
  tokens = [int(s.tokens) for _, s in halves]
  assert tokens[0] != tokens[1]
  share = [t / sum(tokens) for t in tokens]
  close(
    grads,
    jax.tree.map(
      lambda a, b: share[0] * a + share[1] * b, halves[0][0], halves[1][0]
    ),
  )
  close(sums.moe.balance, halves[0][1].moe.balance + halves[1][1].moe.balance)
  mean = np.asarray(sums.moe.balance) / sum(tokens)
  assert np.all((mean > 0.99) & (mean < 2)), 'not a mean over tokens'


def test_auxiliary_losses_train_the_router_but_are_not_reported_as_loss():
  without_balance = replaced(moe={'load_balance': 0.0})
  base, sums = gradient(without_balance, params(), rows())
  grads, on_sums = gradient(CONFIG, params(), rows())
  close(on_sums.nll_sum, sums.nll_sum)
  router = [g['blocks']['moe']['router']['kernel'] for g in (grads, base)]
  assert np.abs(router[0] - router[1]).max() > 1e-4
  close(grads['head'], base['head'])


def test_auxiliary_loss_is_its_weights_times_its_parts():
  h = train_step.hyper(CONFIG)
  batch = train_step.split_labels(rows())
  total, sums = jax.jit(functools.partial(train_step.summed_loss, CONFIG))(
    h, params(), batch, {}
  )
  _, lines = run(CONFIG)
  tokens = int(sums.tokens)
  extra = (float(total) - float(sums.nll_sum)) / tokens
  real = int((batch['segment_ids'] > 0).sum())
  assert int(sums.moe.tokens[0]) == real
  # Two layers, means are logged; z is summed over real, not scored, tokens.
  want = 2 * 0.1 * lines[0]['moe/load_balance']
  want += 2 * 0.1 * lines[0]['moe/router_z'] * real / tokens
  assert extra == pytest.approx(want, rel=1e-4)


def test_training_with_experts_lowers_the_loss():
  p, h = program(CONFIG), train_step.hyper(CONFIG)
  state, seen = p.init(CONFIG), []
  for _ in range(20):
    state, out = p.step(state, h, p.put_batch(rows()))
    seen.append(float(out['train/loss']))
  assert seen[-1] < seen[0] - 0.5


def test_dense_models_report_no_experts():
  dense = dataclasses.replace(
    CONFIG, model=dataclasses.replace(MODEL, moe=MoeConfig())
  )
  p, h = program(dense), train_step.hyper(dense)
  assert p.abstract_state.moe_state == {}
  _, out = jax.eval_shape(p.step.__wrapped__, p.abstract_state, h, rows())
  assert 'train/loss' in out
  assert not [name for name in out if name.startswith('moe/')]


# --- Balancing bias ----------------------------------------------------------

BIASED = replaced(moe={'bias_rate': 0.02, 'load_balance': 0.0})


def test_bias_follows_the_sign_of_the_load_error():
  state, _ = run(BIASED)
  batch, h = train_step.split_labels(rows()), train_step.hyper(BIASED)
  _, sums = jax.jit(functools.partial(train_step.summed_loss, BIASED))(
    h, params(BIASED), batch, moe.initial_state(BIASED.model)
  )
  load = np.asarray(sums.moe.load, np.float64)
  want = 0.02 * np.sign(load.mean(-1, keepdims=True) - load)
  close(state.moe_state['blocks']['moe']['bias'], want)
  assert np.abs(want).max() > 0


def test_bias_decides_who_gets_a_token_also_in_evaluation():
  p, h = program(BIASED), train_step.hyper(BIASED)
  state = p.init(BIASED)
  batch = p.put_batch(train_step.split_labels(rows()))
  pushed = jax.tree.map(lambda b: b.at[:, 0].set(9.0), state.moe_state)
  before, after = (
    p.evaluate(state.params, h, batch, s) for s in (state.moe_state, pushed)
  )
  assert np.abs(np.asarray(before - after)).max() > 1e-3


def test_a_restored_run_has_every_bit_of_the_biases(tmp_path):
  straight, _ = run(BIASED, n=10)
  state, _ = run(BIASED, n=5)
  saved = jax.device_get(state)
  data = iter(grain.MapDataset.range(8).to_iter_dataset())
  keeper = checkpoint.Checkpointer(tmp_path, CheckpointConfig())
  keeper.save(5, state, data, {})
  restored, _ = keeper.restore(5, program(BIASED).abstract_state, data)
  keeper.close()
  assert np.abs(saved.moe_state['blocks']['moe']['bias']).max() > 0
  for a, b in zip(
    jax.tree.leaves(saved), jax.tree.leaves(restored), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  resumed, _ = run(BIASED, n=5, state=restored, start=5)
  for a, b in zip(
    jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True
  ):
    np.testing.assert_array_equal(a, b)


# --- Devices -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.multi_device
@pytest.mark.parametrize(
  'mesh, change',
  [
    ({'expert': 2, 'tensor': 2}, {'moe': {'shared': 1, 'bias_rate': 0.01}}),
    (
      {'fsdp': 2, 'expert': 2},
      {'moe': {'dispatch': 'ragged'}, 'model': {'remat': 'full'}},
    ),
    ({'data': 2, 'fsdp': 2}, {'train': {'accumulation': 2}}),
  ],
  ids=str,
)
def test_steps_on_many_devices_equal_those_on_one(mesh, change):
  mesh = {'data': 1} | mesh
  config = replaced(**change)
  many = replaced(config, mesh=mesh)
  one_state, one = run(config, n=2)
  many_state, four = run(many, n=2, devices=tuple(jax.devices()[:4]))
  for name in one[0]:
    np.testing.assert_allclose(
      [x[name] for x in four], [x[name] for x in one], rtol=1e-5, atol=1e-7
    )
  # Adam divides by the gradient's size: noise near 0 is an update's worth.
  close(many_state.params, one_state.params, 1e-3)
  close(many_state.moe_state, one_state.moe_state)


@pytest.mark.multi_device
@pytest.mark.parametrize(
  'mesh',
  [{'fsdp': 2, 'expert': 4}, {'fsdp': 2, 'expert': 2, 'tensor': 2}],
  ids=str,
)
def test_gradients_on_many_devices_equal_those_on_one(mesh):
  want, _ = gradient(CONFIG, params(), rows())
  close(gradients_over(mesh), want)


def gradients_over(mesh):
  config = replaced(mesh={'data': 1} | mesh)
  many = program(config, tuple(jax.devices()[:8]))
  sharded = jax.device_put(
    jax.device_get(params()),
    jax.tree.map(lambda x: x.sharding, many.abstract_state.params),
  )
  # A new function each time: a compile must not outlive a monkeypatch.
  fresh = jax.jit(lambda *args: gradient.__wrapped__(*args), static_argnums=0)
  got, _ = many.in_mesh(fresh)(CONFIG, sharded, many.put_batch(rows()))
  return got


def kept(x, axes, *, tiled, scatter_dimension):
  """Each device's own part, without what the others have of it."""
  parts = jnp.split(x, jax.lax.axis_size(axes), scatter_dimension)
  return jnp.stack(parts)[jax.lax.axis_index(axes)]


SLOW = pytest.mark.slow


@pytest.mark.multi_device
@pytest.mark.parametrize(
  'name, wrong',
  [
    ('psum', lambda x, axes: x),
    pytest.param('psum_scatter', kept, marks=SLOW),
    pytest.param('axis_index', lambda axes: 0, marks=SLOW),
  ],
)
def test_a_wrong_collective_shows(monkeypatch, name, wrong):
  # That the test above can fail.
  want, _ = gradient(CONFIG, params(), rows())
  monkeypatch.setattr(moe.jax.lax, name, wrong)
  got = gradients_over({'fsdp': 2, 'expert': 2, 'tensor': 2})
  monkeypatch.undo()
  with pytest.raises(AssertionError, match='Mismatched elements'):
    close(got, want)


@pytest.mark.multi_device
def test_experts_lie_on_their_devices():
  mesh = {'data': 1, 'fsdp': 2, 'expert': 4}
  p = program(replaced(mesh=mesh), tuple(jax.devices()[:8]))
  kernels = p.abstract_state.params['blocks']['moe']
  shard = {
    name: kernels[name]['kernel'].sharding.shard_shape(
      kernels[name]['kernel'].shape
    )
    for name in ('up', 'down', 'router')
  }
  assert shard == {
    'up': (2, 1, 8, 24),
    'down': (2, 1, 24, 8),
    'router': (2, 2, 4),
  }

"""reinit: which draw a parameter gets, and what it keeps of the old array."""

import hashlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding

from gamma_jax import EXEMPT, Axes, audit, gamma_normal, reinit
from gamma_jax.tree_rules import AuditError

KEY = jax.random.key(0)
# reinit of a 2 x 2 matrix named 'w' from KEY at gamma 0.
GOLDEN = [[-1.676268, -1.180369], [1.557896, -1.303674]]
RULES = {
  'table': Axes((1,), (0,)),
  '*/kernel': Axes((1,), (2,), (0,)),
  '**/scale': EXEMPT,
}


def model():
  return {
    'table': jnp.zeros((256, 64)),
    'up': {'kernel': jnp.zeros((3, 64, 128)), 'scale': jnp.ones((3, 64))},
    'down': {'kernel': jnp.zeros((3, 128, 64))},
  }


@pytest.mark.parametrize('distribution', ['normal', 'truncated_normal'])
@pytest.mark.parametrize('gamma', [0.7, 1.0])
def test_the_redrawn_model_passes_the_audit(gamma, distribution):
  params = model()
  assert not audit(params, RULES, gamma=gamma).ok
  new = reinit(params, KEY, gamma, RULES, distribution=distribution)
  audit(new, RULES, gamma=gamma).raise_if_off()
  assert jax.tree.structure(new) == jax.tree.structure(params)
  bound = float(jnp.max(jnp.abs(new['table']))) * 64**gamma
  assert (bound < 2.28) == (distribution == 'truncated_normal')


def test_exempt_parameters_are_the_same_objects():
  params = model()
  new = reinit(params, KEY, 1.0, RULES)
  assert new['up']['scale'] is params['up']['scale']


def test_another_gamma_is_an_exact_rescaling():
  a = reinit(model(), KEY, 0.5, RULES)
  b = reinit(model(), KEY, 1.0, RULES)
  # 64^-0.5 is a power of two, 128^-0.5 is not.
  np.testing.assert_array_equal(a['table'], b['table'] * 8)
  np.testing.assert_allclose(
    a['down']['kernel'], b['down']['kernel'] * 128**0.5, rtol=3e-7
  )


def test_a_draw_does_not_depend_on_the_other_parameters():
  alone = reinit(model(), KEY, 1.0, RULES)
  more = {'a_first': {'kernel': jnp.zeros((3, 64, 128))}, **model()}
  more['up']['zz_last'] = {'scale': jnp.ones(5)}
  together = reinit(more, KEY, 1.0, RULES)
  for path in ('table', 'up', 'down'):
    old = jax.tree.leaves(alone[path])
    new = jax.tree.leaves(together[path])
    for a, b in zip(old, new, strict=False):
      np.testing.assert_array_equal(a, b)
  # Nor do two parameters of one shape share a draw.
  assert not np.array_equal(
    together['a_first']['kernel'], together['up']['kernel']
  )


def test_draws_are_fixed_for_good():
  # Golden: a change here breaks every experiment that quotes a seed.
  new = reinit({'w': jnp.zeros((2, 2))}, KEY, 0.0, {'w': Axes((0,), (1,))})
  np.testing.assert_allclose(new['w'], GOLDEN, rtol=1e-6)


def test_keys_matter():
  a = reinit(model(), KEY, 1.0, RULES)['table']
  b = reinit(model(), jax.random.key(1), 1.0, RULES)['table']
  assert not np.array_equal(a, b)


def test_dtype_is_kept_and_half_precision_is_cast_last():
  params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), model())
  half = reinit(params, KEY, 1.0, RULES)
  full = reinit(model(), KEY, 1.0, RULES)
  for h, f in zip(jax.tree.leaves(half), jax.tree.leaves(full), strict=True):
    assert h.dtype == jnp.bfloat16
    np.testing.assert_array_equal(h, f.astype(jnp.bfloat16))


def test_numpy_arrays_stay_numpy():
  new = reinit(jax.tree.map(np.asarray, model()), KEY, 1.0, RULES)
  assert {type(w) for w in jax.tree.leaves(new)} == {np.ndarray}
  np.testing.assert_array_equal(
    new['table'], reinit(model(), KEY, 1.0, RULES)['table']
  )


@pytest.mark.multi_device
@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_sharding_is_kept_and_does_not_change_the_draw(axis_type):
  mesh = jax.make_mesh((2, 4), ('a', 'b'), (axis_type,) * 2)
  sharding = NamedSharding(mesh, jax.P('a', 'b'))
  params = model()
  params['table'] = jax.device_put(params['table'], sharding)
  new = reinit(params, KEY, 1.0, RULES)
  assert new['table'].sharding == sharding
  plain = reinit(model(), KEY, 1.0, RULES)
  np.testing.assert_array_equal(new['table'], plain['table'])
  assert not new['down']['kernel'].committed  # was free to move, still is
  audit(new, RULES, gamma=1.0).raise_if_off()


@pytest.mark.multi_device
def test_a_single_other_device_is_kept():
  params = jax.device_put(model(), jax.devices()[3])
  new = reinit(params, KEY, 1.0, RULES)
  assert new['table'].devices() == {jax.devices()[3]}


def test_gamma_may_be_traced_and_vectorised():
  gammas = jnp.array([0.5, 0.75, 1.0])
  many = jax.vmap(lambda g: reinit(model(), KEY, g, RULES))(gammas)
  for i, gamma in enumerate((0.5, 0.75, 1.0)):
    one = reinit(model(), KEY, gamma, RULES)
    np.testing.assert_allclose(many['table'][i], one['table'], rtol=3e-6)


def test_abstract_models_can_be_drawn():
  abstract = jax.eval_shape(model)
  new = reinit(abstract, KEY, 1.0, {**RULES, '**/scale': EXEMPT})
  np.testing.assert_array_equal(
    new['table'], reinit(model(), KEY, 1.0, RULES)['table']
  )


def test_linen_boxes_keep_their_metadata():
  boxed = {'w': nn.Partitioned(jnp.zeros((64, 64)), ('x', 'y'))}
  new = reinit(boxed, KEY, 1.0, {'w': Axes((0,), (1,))})
  assert isinstance(new['w'], nn.Partitioned)
  assert new['w'].names == ('x', 'y')
  assert float(jnp.std(new['w'].value)) == pytest.approx(1 / 64, rel=0.05)


def test_an_nnx_model_is_redrawn_in_place():
  class Net(nnx.Module):
    def __init__(self, rngs):
      self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(2)])
      self.norm = nnx.RMSNorm(64, rngs=rngs)

  net = Net(nnx.Rngs(0))
  rules = {'layers/*/kernel': Axes((0,), (1,))}
  exempt = ['**/bias', 'norm/scale']
  state = nnx.state(net, nnx.Param)
  new = reinit(state, KEY, 1.0, rules, exempt=exempt)
  assert isinstance(new, nnx.State)
  nnx.update(net, new)
  audit(
    nnx.state(net, nnx.Param), rules, gamma=1.0, exempt=exempt
  ).raise_if_off()
  a, b = (layer.kernel[...] for layer in net.layers)
  assert not np.array_equal(a, b)
  # The same weights by path, whatever the container.
  plain = reinit(nnx.to_pure_dict(state), KEY, 1.0, rules, exempt=exempt)
  np.testing.assert_array_equal(a, plain['layers'][0]['kernel'])


def test_it_draws_what_gamma_normal_draws():
  (w,) = reinit([jnp.zeros((64, 32))], KEY, 0.7, {'0': Axes((0,), (1,))})
  got = gamma_normal(0.7, 0, 1)(path_key('0'), (64, 32))
  np.testing.assert_allclose(w, got, rtol=3e-7)


def path_key(path):
  digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
  low, high = np.frombuffer(digest, '<u4')
  return jax.random.fold_in(jax.random.fold_in(KEY, low), high)


def test_rules_are_checked_as_in_audit():
  with pytest.raises(AuditError, match="'nothing' covers no parameter"):
    reinit(model(), KEY, 1.0, {**RULES, 'nothing': EXEMPT})
  with pytest.raises(AuditError, match='gamma must be finite'):
    reinit(model(), KEY, float('nan'), RULES)
  with pytest.raises(ValueError, match='uniform'):
    reinit(model(), KEY, 1.0, RULES, distribution='uniform')

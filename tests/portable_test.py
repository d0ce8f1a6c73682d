"""gamma_normal in the layers that others write: Linen, NNX and bare params.

Each case states d_in by hand and checks it twice: the layer fed with ones,
its weights set to one, must count d_in terms in every output; and the weights
it draws must have the std d_in^(-gamma).
"""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gamma_jax import gamma_normal
from gamma_jax.initializers import gamma_std, scaled_normal

GAMMAS = (0.7, 1.0)
TOLERANCE = 0.02  # every matrix has at least 32 000 weights: 5 sigmas
DENSE = (0, 1)


@dataclasses.dataclass(frozen=True)
class Case:
  """A layer, the axes for it, its input and its d_in.

  `make(init)` builds the layer; `copies` counts independent matrices along
  the leading axes of the kernel.
  """

  make: Callable
  axes: tuple
  x_shape: tuple[int, ...]
  d_in: int
  copies: int = 1
  method: str = '__call__'


class RawParam(nn.Module):
  """[B, D] -> [B, N, H] by a weight without a layer."""

  kernel_init: Callable

  @nn.compact
  def __call__(self, x):
    w = self.param('w', self.kernel_init, (x.shape[-1], 8, 64))
    return jnp.einsum('BD,DNH->BNH', x, w)


class ScanStack(nn.Module):
  """Each layer sees the same input, so that d_in shows in every output."""

  kernel_init: Callable

  @nn.compact
  def __call__(self, x):
    layer = nn.scan(
      lambda dense, x, _: (x, dense(x)),
      variable_axes={'params': 0},
      split_rngs={'params': True},
      length=6,
    )
    return layer(dense(128, self.kernel_init), x, None)[1]


class Experts(nn.Module):
  """[B, D] -> [E, B, F] by E copies of Dense."""

  kernel_init: Callable

  @nn.compact
  def __call__(self, x):
    stack = nn.vmap(
      nn.Dense,
      in_axes=None,
      axis_size=6,
      variable_axes={'params': 0},
      split_rngs={'params': True},
    )
    return stack(128, kernel_init=self.kernel_init, use_bias=False)(x)


def dense(features, init, **kwargs):
  return nn.Dense(features, kernel_init=init, use_bias=False, **kwargs)


def general(features, init, **kwargs):
  return nn.DenseGeneral(features, kernel_init=init, use_bias=False, **kwargs)


LINEN = {
  'Dense': Case(lambda i: dense(512, i), DENSE, (2, 300), 300),
  'DenseGeneral, many outputs': Case(
    lambda i: general((8, 64), i), DENSE, (2, 256), 256
  ),
  'DenseGeneral, many inputs': Case(
    lambda i: general(256, i, axis=(-2, -1)), DENSE, (2, 8, 40), 320
  ),
  'DenseGeneral, both': Case(
    lambda i: general((4, 32), i, axis=(-2, -1)), DENSE, (2, 8, 64), 512
  ),
  'Einsum, query': Case(
    lambda i: nn.Einsum((256, 8, 64), 'BD,DNH->BNH', False, kernel_init=i),
    (0, (1, 2)),
    (2, 256),
    256,
  ),
  'Einsum, output': Case(
    lambda i: nn.Einsum((8, 64, 256), 'BNH,NHD->BD', False, kernel_init=i),
    ((0, 1), 2),
    (2, 8, 64),
    512,
  ),
  'Einsum, experts': Case(
    lambda i: nn.Einsum((4, 256, 128), 'BED,EDF->BEF', False, kernel_init=i),
    (1, 2, 0),
    (2, 4, 256),
    256,
    copies=4,
  ),
  'Embed': Case(
    lambda i: nn.Embed(2048, 64, embedding_init=i),
    (1, 0),
    (2, 64),
    64,
    1,
    'attend',
  ),
  'Conv': Case(
    lambda i: nn.Conv(256, 3, padding='VALID', kernel_init=i, use_bias=False),
    ((0, 1), 2),
    (2, 5, 128),
    384,
  ),
  'raw param': Case(RawParam, (0, (1, 2)), (2, 256), 256),
  'scan over layers': Case(ScanStack, DENSE, (2, 256), 256, copies=6),
  'vmap over experts': Case(Experts, DENSE, (2, 256), 256, copies=6),
}


def nnx_general(ins, outs, axis=-1, batch=None):
  def make(init, rngs):
    return nnx.LinearGeneral(
      ins,
      outs,
      axis=axis,
      batch_axis=batch or {},
      use_bias=False,
      kernel_init=init,
      rngs=rngs,
    )

  return make


def nnx_einsum(equation, shape):
  def make(init, rngs):
    return nnx.Einsum(equation, shape, None, kernel_init=init, rngs=rngs)

  return make


def nnx_linear(init, rngs, features=512):
  return nnx.Linear(300, features, use_bias=False, kernel_init=init, rngs=rngs)


class NnxStack(nnx.Module):
  """Copies of Linear made under nnx.vmap."""

  def __init__(self, init, rngs):
    @nnx.split_rngs(splits=6)
    @nnx.vmap
    def make(rngs):
      return nnx_linear(init, rngs, features=128)

    self.layers = make(rngs)

  def __call__(self, x):
    return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(
      self.layers, x
    )


NNX = {
  'Linear': Case(nnx_linear, DENSE, (2, 300), 300),
  'LinearGeneral, many outputs': Case(
    nnx_general(256, (8, 64)), DENSE, (2, 256), 256
  ),
  'LinearGeneral, many inputs': Case(
    nnx_general((8, 40), 256, (-2, -1)), DENSE, (2, 8, 40), 320
  ),
  'Einsum, query': Case(
    nnx_einsum('BD,DNH->BNH', (256, 8, 64)), (0, (1, 2)), (2, 256), 256
  ),
  'Einsum, output': Case(
    nnx_einsum('BNH,NHD->BD', (8, 64, 256)), ((0, 1), 2), (2, 8, 64), 512
  ),
  'Embed': Case(
    lambda i, rngs: nnx.Embed(2048, 64, embedding_init=i, rngs=rngs),
    (1, 0),
    (2, 64),
    64,
    1,
    'attend',
  ),
  'vmap over layers': Case(NnxStack, DENSE, (2, 300), 300, copies=6),
}


def assert_std(w, d_in, gamma, copies=1):
  for copy in np.asarray(w).reshape(copies, -1):
    assert copy.std() == pytest.approx(d_in**-gamma, rel=TOLERANCE)


def linen_params(layer, case):
  x = jnp.ones(case.x_shape)
  return layer.init(jax.random.key(0), x, method=case.method)


@pytest.mark.parametrize('name', LINEN)
def test_linen_counts_d_in_terms(name):
  case = LINEN[name]
  layer = case.make(gamma_normal(1.0, *case.axes))
  ones = jax.tree.map(jnp.ones_like, linen_params(layer, case))
  y = layer.apply(ones, jnp.ones(case.x_shape), method=case.method)
  np.testing.assert_array_equal(y, case.d_in)


@pytest.mark.parametrize('gamma', GAMMAS)
@pytest.mark.parametrize('name', LINEN)
def test_linen_draws_the_std_asked(name, gamma):
  case = LINEN[name]
  layer = case.make(gamma_normal(gamma, *case.axes))
  (w,) = jax.tree.leaves(linen_params(layer, case))
  assert_std(w, case.d_in, gamma, case.copies)


@pytest.mark.parametrize('name', NNX)
def test_nnx_counts_d_in_terms(name):
  case = NNX[name]
  layer = case.make(gamma_normal(1.0, *case.axes), rngs=nnx.Rngs(0))
  nnx.update(layer, jax.tree.map(jnp.ones_like, nnx.state(layer, nnx.Param)))
  y = getattr(layer, case.method)(jnp.ones(case.x_shape))
  np.testing.assert_array_equal(y, case.d_in)


@pytest.mark.parametrize('gamma', GAMMAS)
@pytest.mark.parametrize('name', NNX)
def test_nnx_draws_the_std_asked(name, gamma):
  case = NNX[name]
  layer = case.make(gamma_normal(gamma, *case.axes), rngs=nnx.Rngs(0))
  (w,) = jax.tree.leaves(nnx.state(layer, nnx.Param))
  assert_std(w, case.d_in, gamma, case.copies)


def test_linen_and_nnx_draw_the_same_weights_from_the_same_key():
  init = gamma_normal(0.7, *DENSE)
  linear = nnx_linear(init, nnx.Rngs(0))
  key = nnx.Rngs(0).params()
  np.testing.assert_array_equal(
    linear.kernel[...], init(key, (300, 512), jnp.float32)
  )


@pytest.mark.parametrize('gamma', GAMMAS)
def test_attention_layers_take_the_axes_of_dense(gamma):
  init = gamma_normal(gamma, *DENSE)
  x = jnp.ones((1, 2, 256))
  linen = nn.MultiHeadDotProductAttention(4, kernel_init=init, use_bias=False)
  params = linen.init(jax.random.key(0), x)['params']
  theirs = nnx.MultiHeadAttention(
    4, 256, kernel_init=init, use_bias=False, decode=False, rngs=nnx.Rngs(0)
  )
  kernels = [
    *jax.tree.leaves(params),
    *jax.tree.leaves(nnx.state(theirs, nnx.Param)),
  ]
  assert len(kernels) == 8
  for kernel in kernels:
    assert_std(kernel, 256, gamma)


# The one thing that axes cannot say: these layers multiply their batch axes
# into the first axis of the flat shape that they hand over.
def batched_linen(init):
  layer = general(512, init, batch_dims=(0,))
  (w,) = jax.tree.leaves(layer.init(jax.random.key(0), jnp.ones((4, 2, 256))))
  return w


def batched_nnx(init):
  layer = nnx_general(256, 512, batch={0: 4})(init, nnx.Rngs(0))
  return layer.kernel[...]


@pytest.mark.parametrize('draw', [batched_linen, batched_nnx])
def test_batch_axes_of_general_layers_need_a_stated_std(draw):
  axes = draw(gamma_normal(0.7, *DENSE))
  assert axes.shape == (4, 256, 512)
  assert_std(axes, 4 * 256, 0.7, copies=4)  # the trap: 4^0.7 = 2.6x too small
  stated = draw(scaled_normal(gamma_std(256, 0.7)))
  assert_std(stated, 256, 0.7, copies=4)


@pytest.mark.parametrize(
  'partition', [nn.with_partitioning, nn.with_logical_partitioning]
)
def test_linen_metadata_wraps_the_initializer(partition):
  init = partition(gamma_normal(1.0, *DENSE), ('embed', 'mlp'))
  params = dense(512, init).init(jax.random.key(0), jnp.ones((2, 300)))
  assert params['params']['kernel'].names == ('embed', 'mlp')
  assert_std(nn.unbox(params)['params']['kernel'], 300, 1.0)


def test_bfloat16_layers_get_a_float32_draw_cast_last():
  init = gamma_normal(1.0, *DENSE)
  layer = dense(512, init, param_dtype=jnp.bfloat16)
  half = layer.init(jax.random.key(0), jnp.ones((2, 300)))['params']['kernel']
  full = dense(512, init).init(jax.random.key(0), jnp.ones((2, 300)))
  assert half.dtype == jnp.bfloat16
  np.testing.assert_array_equal(
    half, full['params']['kernel'].astype(jnp.bfloat16)
  )

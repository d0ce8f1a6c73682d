"""Feed-forward branch: GELU with two matrices, or SwiGLU with three.

The kind matters to gamma: a GELU branch scales with width as d^(1 - gamma)
relative to the stream, a SwiGLU branch as d^(3/2 - 2 gamma), so its balance
point is gamma = 3/4.
"""

from __future__ import annotations

import flax.linen as nn
import jax

from gamma_jax import init_rules, layers
from gamma_jax.config import ModelConfig


def hidden_units(up: jax.Array, gate: jax.Array | None) -> jax.Array:
  """SwiGLU of [..., F] and its gate; GELU where there is no gate."""
  if gate is None:
    return jax.nn.gelu(up, approximate=False)
  return jax.nn.silu(gate) * up


class Mlp(nn.Module):
  """Feed-forward branch.

  Attributes:
    config: model shape and numerics.
    rule: initialization rule.
  """

  config: ModelConfig
  rule: init_rules.InitRule

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """[B, T, D] -> [B, T, D]."""
    c = self.config

    def project(name, kind, equation, shape, names):
      return layers.Einsum(
        equation,
        shape,
        kind,
        names,
        self.rule,
        c.dtype,
        c.param_dtype,
        name=name,
      )

    up_names, up_shape = ('embed', 'mlp'), (c.D, c.F)
    up = project('up', 'up', 'BTD,DF->BTF', up_shape, up_names)(x)
    gate = None
    if c.mlp == 'swiglu':
      gate = project('gate', 'mlp_gate', 'BTD,DF->BTF', up_shape, up_names)(x)
    return project('down', 'down', 'BTF,FD->BTD', (c.F, c.D), ('mlp', 'embed'))(
      hidden_units(up, gate)
    )

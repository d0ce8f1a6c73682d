"""The rule that gives each matrix of the model its std.

A layer states what its matrix is (`kind`) and which axes are contracted; the
rule answers with a std. All rules take this one path. Sources: gamma: arXiv
2606.17945; the others: paper.md section 12 in the project's reference, that
is GPT-2/nanoGPT, Megatron-LM, He et al. 2015, Glorot and Bengio 2010, and
SmallInit (Nguyen and Salazar 2019) with Wang's output scale (GPT-NeoX).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp

from gamma_jax import config as config_lib
from gamma_jax import initializers, shapes

RULES = ('gamma', 'fixed', 'xavier', 'he', 'gpt2', 'megatron', 'small_wang')

ROLE_OF_KIND = {
  'embed': 'embed',
  'head': 'head',
  'q': 'qk',
  'k': 'qk',
  'v': 'vo',
  'o': 'vo',
  'gate': 'gate',
  'up': 'mlp',
  'mlp_gate': 'mlp',
  'down': 'mlp',
  'router': 'router',
  'expert_up': 'mlp',
  'expert_gate': 'mlp',
  'expert_down': 'mlp',
}
MLP_OUTPUTS = ('down', 'expert_down')
RESIDUAL_OUTPUTS = ('o', *MLP_OUTPUTS)  # what is added to the residual stream


@dataclasses.dataclass(frozen=True, eq=False)
class InitRule:
  """std of a matrix from its kind and fans.

  Attributes:
    name: one of RULES.
    gammas: gamma by role; numbers or traced float32 scalars.
    std: base std of rules 'fixed' and 'megatron'; may be traced.
    distribution: 'normal' or 'truncated_normal'.
    depth_scale: divide residual outputs by sqrt(2 L).
    down_fan_in: d_in of the MLP down projection: 'hidden' F or 'model' D.
    D: model width.
    L: layers.
  """

  name: str
  gammas: Mapping[str, initializers.Scalar]
  std: initializers.Scalar
  distribution: str
  depth_scale: bool
  down_fan_in: str
  D: int
  L: int

  def matrix_std(self, kind: str, fan_in: int, fan_out: int):
    """Returns the std asked of one matrix (a number, or traced)."""
    if kind in MLP_OUTPUTS and self.down_fan_in == 'model':
      fan_in = self.D
    std = self._base_std(kind, fan_in, fan_out)
    residual = kind in RESIDUAL_OUTPUTS
    if residual and (self.depth_scale or self.name in ('gpt2', 'megatron')):
      std = std / (2 * self.L) ** 0.5
    return std

  def _base_std(self, kind: str, fan_in: int, fan_out: int):
    match self.name:
      case 'gamma':
        gamma = self.gammas[ROLE_OF_KIND[kind]]
        return initializers.gamma_std(fan_in, gamma)
      case 'fixed' | 'megatron':
        return self.std
      case 'gpt2':
        return 0.02
      case 'xavier':
        return (2 / (fan_in + fan_out)) ** 0.5
      case 'he':
        return (2 / fan_in) ** 0.5
      case 'small_wang' if kind in RESIDUAL_OUTPUTS:
        return 2 / (self.L * self.D**0.5)
      case 'small_wang':
        return (2 / (5 * self.D)) ** 0.5
    raise ValueError(f'unknown init rule {self.name!r}: not in {RULES}')

  def initializer(
    self, kind: str, axes: shapes.Axes
  ) -> initializers.Initializer:
    """Returns the initializer of one matrix."""
    if kind not in ROLE_OF_KIND:
      raise ValueError(f'matrix kind {kind!r} has no role: {ROLE_OF_KIND}')

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
      std = self.matrix_std(kind, *axes.fans(shape))
      draw = initializers.scaled_normal(std, self.distribution)
      return draw(key, shape, dtype, out_sharding)

    return init


def role_gammas(init: config_lib.InitConfig) -> dict[str, float]:
  """gamma by role: the override where one is given, else `init.gamma`."""
  overrides = dataclasses.asdict(init.overrides)
  return {
    role: init.gamma if overrides[role] is None else overrides[role]
    for role in config_lib.ROLES
  }


def make_rule(
  init: config_lib.InitConfig,
  model: config_lib.ModelConfig,
  gammas: Mapping[str, initializers.Scalar] | None = None,
  std: initializers.Scalar | None = None,
) -> InitRule:
  """Builds the rule; traced `gammas` and `std` replace the config's numbers."""
  return InitRule(
    name=init.rule,
    gammas=role_gammas(init) if gammas is None else gammas,
    std=init.std if std is None else std,
    distribution=init.distribution,
    depth_scale=init.depth_scale,
    down_fan_in=init.down_fan_in,
    D=model.D,
    L=model.L,
  )

"""The compiled program of one shape on one mesh: init, step, evaluate, decode.

jit, shardings and donation are decided here and in population.py, nowhere
else. Cells of one shape share one Program, so a grid over traced numbers
compiles its train step once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import numpy as np
from flax.core import meta

from gamma_jax import decode, layers, sharding, train_step
from gamma_jax.config import Config, InitOverrides


@dataclasses.dataclass(frozen=True)
class Program:
  """Compiled functions of one shape on one mesh.

  Attributes:
    config: the shape; its init and traced fields mean nothing.
    mesh: devices.
    step: (TrainState, Hyper, batch) -> (TrainState, metrics); donates state.
    evaluate: (params, Hyper, batch, moe_state) -> NLL [B, T], in full in every
      process.
    answers: the same -> log-probabilities [B, V] of what follows each row.
    prefill: decode.prefill without its config; `slots` is static.
    extend: decode.extend without its config; donates the Decoding, `steps` is
      static, the tokens are in full in every process.
    abstract_state: ShapeDtypeStructs with shardings, to restore into.
    declarations: parameter path -> what its layer states.
  """

  config: Config
  mesh: jax.sharding.Mesh
  step: Callable
  evaluate: Callable
  answers: Callable
  prefill: Callable
  extend: Callable
  abstract_state: train_step.TrainState
  declarations: dict[str, layers.Declared]

  def init(self, config: Config) -> train_step.TrainState:
    """Draws the state that `config` asks for, sharded.

    The init rule shapes this small program but not the train step, so arms
    with different rules share the compiled step.
    """
    options = dataclasses.replace(
      config.init, gamma=1.0, std=0.02, overrides=InitOverrides()
    )
    static = dataclasses.replace(self.config, init=options)
    where = jax.tree.map(lambda x: x.sharding, self.abstract_state)
    draw = _compiled_init(static, _Hashable(where))
    return self.in_mesh(draw)(train_step.hyper(config))

  @property
  def everywhere(self) -> jax.NamedSharding:
    """One copy on every device, so that every process can read it."""
    return sharding.replicated(self.mesh)

  def lower_step(self, h, batch) -> jax.stages.Lowered:
    """`step` lowered and not run; the arguments may be abstract."""
    lower = self.in_mesh(self.step.__wrapped__.lower)
    return lower(self.abstract_state, h, batch)

  def in_mesh(self, fn: Callable) -> Callable:
    """`fn` traced and run under the mesh and the logical axis rules."""
    return in_mesh(self.mesh, fn)

  def put_batch(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """A global batch, the same in every process -> its rows on the devices."""
    where = sharding.batch_sharding(self.mesh)
    return {
      k: jax.make_array_from_callback(v.shape, where, v.__getitem__)
      for k, v in batch.items()
    }

  def put_weights(self, params, moe_state):
    """(params, moe_state) from anywhere -> on the devices of the program."""
    where = jax.tree.map(
      lambda x: x.sharding,
      (self.abstract_state.params, self.abstract_state.moe_state),
    )
    return jax.device_put((params, moe_state), where)


class _Hashable:
  """A tree of shardings as a cache key."""

  def __init__(self, tree):
    leaves, structure = jax.tree.flatten(tree)
    self.tree, self._key = tree, (tuple(leaves), structure)

  def __hash__(self):
    return hash(self._key)

  def __eq__(self, other):
    return self._key == other._key


@functools.lru_cache(maxsize=16)
def _compiled_init(config: Config, where: _Hashable) -> Callable:
  return jax.jit(
    lambda h: meta.unbox(train_step.init_boxed_state(config, h)),
    out_shardings=where.tree,
  )


def build(
  config: Config, devices: tuple[jax.Device, ...] | None = None
) -> Program:
  """Builds the program of `config`; cells of one shape get the same object.

  Args:
    config: only the fields that shape the program matter; pass
      `configure.program_key(config)` to share compiles.
    devices: None takes all.
  """
  return _build(config, tuple(devices or jax.devices()))


def in_mesh(mesh: jax.sharding.Mesh, fn: Callable) -> Callable:
  """`fn` traced and run under `mesh` and the logical axis rules."""

  @functools.wraps(fn)
  def wrapped(*args):
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
      return fn(*args)

  return wrapped


@functools.lru_cache(maxsize=8)
def _build(config: Config, devices: tuple[jax.Device, ...]) -> Program:
  mesh = sharding.make_mesh(config.mesh, devices)
  boxed = jax.eval_shape(
    functools.partial(train_step.init_boxed_state, config),
    train_step.hyper(config),
  )
  where = sharding.tree_shardings(boxed, mesh)
  declarations = layers.declarations(boxed.params)
  everywhere = sharding.replicated(mesh)
  step = jax.jit(
    functools.partial(train_step.train_step, config, train_step.roles(config)),
    donate_argnums=0,
    out_shardings=(where, everywhere),
  )
  evaluate, answers = (
    jax.jit(functools.partial(fn, config), out_shardings=everywhere)
    for fn in (train_step.eval_step, train_step.answer_step)
  )
  prefill = jax.jit(functools.partial(decode.prefill, config), static_argnums=4)
  extend = jax.jit(
    functools.partial(decode.extend, config),
    static_argnums=5,
    donate_argnums=3,
    out_shardings=(None, everywhere),
  )
  return Program(
    config=config,
    mesh=mesh,
    step=in_mesh(mesh, step),
    evaluate=in_mesh(mesh, evaluate),
    answers=in_mesh(mesh, answers),
    prefill=in_mesh(mesh, prefill),
    extend=in_mesh(mesh, extend),
    abstract_state=jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      meta.unbox(boxed),
      where,
    ),
    declarations=declarations,
  )

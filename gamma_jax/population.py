"""Engines that train one cell, or many cells of one shape in one program.

Cells that differ only in traced numbers (seed, init, norm eps, learning rate,
weight decay) share one compiled step. On CPU the members are spread over
virtual devices with shard_map and run one after the other inside (`map`),
which is bitwise equal to running each alone; `vmap` batches them, which suits
an accelerator and small models but changes the last bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from gamma_jax import program as program_lib
from gamma_jax import sharding, train_step
from gamma_jax.config import Config

Batch = dict[str, np.ndarray]


class Engine(Protocol):
  """What the trainer needs to run P members side by side.

  Attributes:
    program: compiled functions of one member.
    abstract_state: what a checkpoint is restored into.
  """

  program: program_lib.Program
  abstract_state: object

  def init(self):
    """Draws the state of every member."""

  def step(self, state, batches: Sequence[Batch]):
    """One update of every member -> (state, metrics with [P] values)."""

  def nll(self, state, batch: Batch) -> np.ndarray:
    """NLL [P, B, T] of one evaluation batch."""

  def params(self, state, member: int):
    """Parameters of one member, on the devices of `program`."""


class Single:
  """One member: the plain train step on the whole mesh."""

  def __init__(self, config: Config, program: program_lib.Program):
    self.program, self._config = program, config
    self.abstract_state = program.abstract_state
    self._hyper = train_step.hyper(config)

  def init(self):
    """Draws the state."""
    return self.program.init(self._config)

  def step(self, state, batches):
    """One update; `batches` has one entry."""
    return self.program.step(
      state, self._hyper, self.program.put_batch(batches[0])
    )

  def nll(self, state, batch):
    """NLL [1, B, T]."""
    return np.asarray(
      self.program.evaluate(
        state.params,
        self._hyper,
        self.program.put_batch(batch),
        state.moe_state,
      )
    )[None]

  def params(self, state, member):
    """The parameters."""
    del member
    return state.params


class Members(NamedTuple):
  """State of a population; every leaf has a leading member axis P.

  A member whose loss or gradient stops being finite is no longer `alive`: it
  keeps its last good state and the others go on.
  """

  state: train_step.TrainState
  alive: jax.Array  # bool [P]


class Population:
  """P members in one program, spread over the `pop` axis of a mesh.

  Args:
    configs: the members; one shape (equal configure.program_key).
    streams: index of the data stream of each member.
    method: 'map' or 'vmap'.
    devices: None takes all.
  """

  def __init__(
    self,
    configs: Sequence[Config],
    program: program_lib.Program,
    streams: Sequence[int],
    method: str,
    devices: Sequence[jax.Device] | None = None,
  ):
    devices = jax.devices() if devices is None else devices
    self.program = program
    self._size = len(configs)
    # Whole rows of members per device; what is added is dropped on reading.
    extra = -len(configs) % len(devices)
    self._configs = [*configs, *[configs[-1]] * extra]
    self._mesh = sharding.population_mesh(devices)
    self._where = jax.NamedSharding(self._mesh, jax.P('pop'))
    hypers = [train_step.hyper(c) for c in self._configs]
    stacked = jax.tree.map(lambda *x: np.stack(x), *hypers)
    self._hyper = jax.device_put(stacked, self._where)
    stream = np.array([*streams, *[streams[-1]] * extra], np.int32)
    self._stream = jax.device_put(stream, self._where)
    self._step, self._nll = _compiled(program.config, self._mesh, method)
    one = program.abstract_state
    self.abstract_state = Members(
      jax.tree.map(self._abstract, one),
      self._abstract(jax.ShapeDtypeStruct((), jnp.bool_)),
    )

  def _abstract(self, x):
    shape = (len(self._configs), *x.shape)
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self._where)

  def init(self) -> Members:
    """Draws every member with its own rule, as a single run would."""
    drawn = [jax.device_get(self.program.init(c)) for c in self._configs]
    state = jax.tree.map(lambda *x: np.stack(x), *drawn)
    alive = np.ones(len(drawn), np.bool_)
    return jax.device_put(Members(state, alive), self._where)

  def step(self, state: Members, batches: Sequence[Batch]):
    """One update of every member that is alive."""
    stacked = {k: np.stack([b[k] for b in batches]) for k in batches[0]}
    state, out = self._step(state, self._hyper, self._stream, stacked)
    return state, {k: v[: self._size] for k, v in out.items()}

  def nll(self, state: Members, batch: Batch) -> np.ndarray:
    """NLL [P, B, T]."""
    return np.asarray(self._nll(state, self._hyper, batch))[: self._size]

  def params(self, state: Members, member: int):
    """Parameters of one member on the program's devices."""
    one = jax.tree.map(lambda x: np.asarray(x[member]), state.state.params)
    where = jax.tree.map(
      lambda x: x.sharding, self.program.abstract_state.params
    )
    return jax.device_put(one, where)


def _each(method: str, fn):
  """Applies `fn` to every member along axis 0."""
  if method == 'vmap':
    return jax.vmap(fn)
  return lambda *args: jax.lax.map(lambda xs: fn(*xs), args)


def _member_step(config, role_of, batches, members, h, stream):
  batch = jax.tree.map(lambda x: x[stream], batches)
  new, out = train_step.train_step(config, role_of, members.state, h, batch)
  finite = jnp.isfinite(out['train/loss']) & jnp.isfinite(out['opt/grad_norm'])
  alive = members.alive & finite
  state = jax.tree.map(lambda a, b: jnp.where(alive, a, b), new, members.state)
  return Members(state, alive), out


def _member_nll(config, batch, members, h):
  state = members.state
  return train_step.eval_step(config, state.params, h, batch, state.moe_state)


@functools.lru_cache(maxsize=8)
def _compiled(config: Config, mesh: jax.sharding.Mesh, method: str):
  """(step, nll) of any population of this shape on this mesh."""
  role_of = train_step.roles(config)
  pop, all_ = jax.P('pop'), jax.P()

  def step(members, h, stream, batches):
    one = functools.partial(_member_step, config, role_of, batches)
    return _each(method, one)(members, h, stream)

  def nll(members, h, batch):
    one = functools.partial(_member_nll, config, batch)
    return _each(method, one)(members, h)

  def spread(fn, in_specs):
    return jax.shard_map(
      fn, mesh=mesh, in_specs=in_specs, out_specs=pop, check_vma=False
    )

  return (
    jax.jit(spread(step, (pop, pop, pop, all_)), donate_argnums=0),
    jax.jit(spread(nll, (pop, pop, all_))),
  )

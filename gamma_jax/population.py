"""Engines that train one cell, or many cells of one shape side by side.

Cells that differ only in traced numbers (seed, init, norm eps, learning rate,
weight decay) share one compiled step, one process and one reading of the data.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Protocol

import jax
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

  def answers(self, state, batch: Batch) -> np.ndarray:
    """Log-probabilities [P, B, V] of what follows each row of inputs."""

  def weights(self, state, member: int):
    """(params, moe_state) of one member, on the devices of `program`."""


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
    return self._ask(self.program.evaluate, state, batch)

  def answers(self, state, batch):
    """Log-probabilities [1, B, V]."""
    return self._ask(self.program.answers, state, batch)

  def _ask(self, fn, state, batch):
    batch = self.program.put_batch(batch)
    out = fn(state.params, self._hyper, batch, state.moe_state)
    return np.asarray(out)[None]

  def weights(self, state, member):
    """(params, moe_state)."""
    del member
    return state.params, state.moe_state


class Spread:
  """P members, each on one of the devices; member i on device i mod n.

  All run the one traced step, compiled once a device, so a member is bitwise
  equal to a single run by construction. (One program with shard_map and
  lax.map is not: inside a loop XLA fuses differently, in the last bit.)
  Steps of members on different devices overlap, as dispatch is asynchronous.

  Args:
    configs: the members; one shape (equal configure.program_key).
    program: the same shape on the first device.
    streams: index of the data stream of each member.
    devices: None takes all; on CPU no more virtual ones than there are cores.
  """

  def __init__(self, configs, program, streams, devices=None):
    if devices is None:
      devices = jax.devices()
      if devices[0].platform == 'cpu':
        devices = devices[: os.cpu_count()]
    self.program, self._configs, self._streams = program, configs, streams
    self._devices = [devices[i % len(devices)] for i in range(len(configs))]
    self._hypers = [
      jax.device_put(train_step.hyper(c), d)
      for c, d in zip(configs, self._devices, strict=True)
    ]
    self._step, self._nll, self._answers = _compiled(program.config)
    self.abstract_state = tuple(
      jax.tree.map(_on(d), program.abstract_state) for d in self._devices
    )

  def init(self) -> tuple[train_step.TrainState, ...]:
    """Draws every member with its own rule."""
    return tuple(
      jax.device_put(self.program.init(c), d)
      for c, d in zip(self._configs, self._devices, strict=True)
    )

  def step(self, state, batches):
    """One update of every member that is alive."""
    # One transfer a device, not one a member.
    there = {
      (s, d): jax.device_put(batches[s], d)
      for s, d in zip(self._streams, self._devices, strict=True)
    }
    results = [
      self._step(one, h, there[s, d])
      for one, h, s, d in zip(
        state, self._hypers, self._streams, self._devices, strict=True
      )
    ]
    states, outs = zip(*results, strict=True)
    return states, {k: [out[k] for out in outs] for k in outs[0]}

  def nll(self, state, batch):
    """NLL [P, B, T]."""
    return self._ask(self._nll, state, batch)

  def answers(self, state, batch):
    """Log-probabilities [P, B, V]."""
    return self._ask(self._answers, state, batch)

  def _ask(self, fn, state, batch):
    out = [
      fn(one.params, h, jax.device_put(batch, d), one.moe_state)
      for one, h, d in zip(state, self._hypers, self._devices, strict=True)
    ]
    return np.stack(jax.device_get(out))

  def weights(self, state, member):
    """(params, moe_state) of one member on the program's devices."""
    return self.program.put_weights(
      state[member].params, state[member].moe_state
    )


class Batched:
  """P members as one batched program over the `pop` axis of a mesh (vmap).

  Suits accelerators and small models. Not bitwise equal to single runs: the
  batched products round differently, so trajectories part in the last bits.

  Args: as Spread.
  """

  def __init__(self, configs, program, streams, devices=None):
    devices = (jax.devices() if devices is None else devices)[: len(configs)]
    self.program, self._size = program, len(configs)
    # Whole rows of members per device; what is added is dropped on reading.
    extra = -len(configs) % len(devices)
    self._configs = [*configs, *[configs[-1]] * extra]
    mesh = sharding.population_mesh(devices)
    self._where = jax.NamedSharding(mesh, jax.P('pop'))
    hypers = [train_step.hyper(c) for c in self._configs]
    stacked = jax.tree.map(lambda *x: np.stack(x), *hypers)
    self._hyper = jax.device_put(stacked, self._where)
    stream = np.array([*streams, *[streams[-1]] * extra], np.int32)
    self._stream = jax.device_put(stream, self._where)
    self._step, self._nll, self._answers = _batched(program.config, mesh)
    self.abstract_state = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        (len(self._configs), *x.shape), x.dtype, sharding=self._where
      ),
      program.abstract_state,
    )

  def init(self) -> train_step.TrainState:
    """Draws every member with its own rule, stacked on axis 0."""
    drawn = [jax.device_get(self.program.init(c)) for c in self._configs]
    stacked = jax.tree.map(lambda *x: np.stack(x), *drawn)
    return jax.device_put(stacked, self._where)

  def step(self, state, batches):
    """One update of every member that is alive."""
    stacked = {k: np.stack([b[k] for b in batches]) for k in batches[0]}
    state, out = self._step(state, self._hyper, self._stream, stacked)
    return state, {k: v[: self._size] for k, v in out.items()}

  def nll(self, state, batch):
    """NLL [P, B, T]."""
    return np.asarray(self._nll(state, self._hyper, batch))[: self._size]

  def answers(self, state, batch):
    """Log-probabilities [P, B, V]."""
    return np.asarray(self._answers(state, self._hyper, batch))[: self._size]

  def weights(self, state, member):
    """(params, moe_state) of one member on the program's devices."""
    one = jax.tree.map(
      lambda x: np.asarray(x[member]), (state.params, state.moe_state)
    )
    return self.program.put_weights(*one)


def _on(device: jax.Device):
  where = jax.sharding.SingleDeviceSharding(device)
  return lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


@functools.lru_cache(maxsize=8)
def _compiled(config: Config):
  """(step, nll, answers) of one member; run where their arguments lie."""
  role_of = train_step.roles(config)
  step = functools.partial(train_step.train_step, config, role_of)
  nll = functools.partial(train_step.eval_step, config)
  answers = functools.partial(train_step.answer_step, config)
  return jax.jit(step, donate_argnums=0), jax.jit(nll), jax.jit(answers)


@functools.lru_cache(maxsize=8)
def _batched(config: Config, mesh: jax.sharding.Mesh):
  """(step, nll, answers) of any population of this shape on this mesh."""
  role_of = train_step.roles(config)
  pop, everywhere = jax.P('pop'), jax.P()

  def step(state, h, stream, batches):
    def one(state, h, stream):
      batch = jax.tree.map(lambda x: x[stream], batches)
      return train_step.train_step(config, role_of, state, h, batch)

    return jax.vmap(one)(state, h, stream)

  def ask(fn, state, h, batch):
    def one(state, h):
      return fn(config, state.params, h, batch, state.moe_state)

    return jax.vmap(one)(state, h)

  def spread(fn, in_specs):
    return jax.shard_map(
      fn, mesh=mesh, in_specs=in_specs, out_specs=pop, check_vma=False
    )

  return (
    jax.jit(spread(step, (pop, pop, pop, everywhere)), donate_argnums=0),
    *(
      jax.jit(spread(functools.partial(ask, fn), (pop, pop, everywhere)))
      for fn in (train_step.eval_step, train_step.answer_step)
    ),
  )

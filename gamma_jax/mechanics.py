"""What the weights and the attention are doing, at log-spaced steps of a run.

Condensation of every matrix (analysis/condensation.py), attention sinks, gates
and activations (analysis/attention_sink.py), and how much each branch adds to
the residual stream. Measured on fixed held-out rows, so that all arms and all
steps see the same text; its own compiled function, so that the train step is
the same with and without it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gamma_jax import (
  attention,
  init_rules,
  layers,
  model,
  moe,
  sharding,
  train_step,
)
from gamma_jax.analysis import (
  attention_sink,
  condensation,
  condensation_tree,
)
from gamma_jax.config import Config, DataConfig
from gamma_jax.data import anchor, pipeline

ROWS = 8  # held out, rounded up to what the devices divide
NORM = 'condense/frobenius/'


def is_due(step: int, per_decade: int, last: int) -> bool:
  """True at 0, at `last` and at round(10^(k / per_decade)); never with 0."""
  if per_decade == 0:
    return False
  if step in (0, last):
    return True
  k = round(per_decade * np.log10(step))
  # Rounding makes some exponents meet at one small step: that is one step.
  return any(
    round(10 ** (j / per_decade)) == step for j in (k - 1, k, k + 1) if j >= 0
  )


def heldout_rows(
  data: DataConfig, mesh: jax.sharding.Mesh, seq_len: int
) -> dict[str, np.ndarray]:
  """The first held-out rows, [B, T] fields; the same in every arm."""
  shards = math.prod(mesh.shape[axis] for axis in sharding.BATCH_AXES)
  rows = -(-ROWS // shards) * shards
  if data.source == anchor.SOURCE:
    return anchor.questions(anchor.heldout_rows(rows))
  batches = pipeline.eval_batches(
    data, seq_len=seq_len, batch_size=rows, documents=0
  )
  return next(iter(batches))


class Mechanics:
  """Measures the members of an engine.

  Args:
    engine: population.Engine.
    configs: the members; log.mechanics of the first says how often.
  """

  def __init__(self, engine, configs: Sequence[Config]):
    one, program = configs[0], engine.program
    self._per_decade, self._last = one.log.mechanics, one.train.steps
    if not self._per_decade:
      return
    self._engine = engine
    self._hypers = [train_step.hyper(c) for c in configs]
    self._fn = program.in_mesh(_compiled(program.config, program.everywhere))
    rows = heldout_rows(one.data, program.mesh, one.train.seq_len)
    self._batch = program.put_batch(rows)
    floor = attention_sink.uniform_floor(jnp.asarray(rows['segment_ids']))
    self._constants = {'sink/uniform_floor': float(floor)} | _random_ranks(
      program.declarations
    )

  def measure(self, state, step: int) -> list[Mapping[str, jax.Array]] | None:
    """Dispatches the measurement of every member; None where none is due."""
    if not is_due(step, self._per_decade, self._last):
      return None
    return [
      self._fn(*self._engine.weights(state, i), h, self._batch)
      for i, h in enumerate(self._hypers)
    ]

  def line(
    self,
    measured: Mapping[str, jax.Array],
    initial: Mapping[str, float] | None = None,
  ) -> dict[str, float]:
    """Names and numbers for metrics.jsonl.

    Args:
      measured: of one member, from `measure`.
      initial: `norms` of the line of step 0; None leaves out the ratios.
    """
    values = jax.device_get(dict(measured))
    out = dict(self._constants)
    for name, value in values.items():
      if np.ndim(value) == 0:
        out[name] = float(value)
      for at in np.ndindex(np.shape(value)) if np.ndim(value) else ():
        out['/'.join([name, *map(str, at)])] = float(value[at])
    for name, norm in (initial or {}).items():
      ratio = name.replace(NORM, 'condense/frobenius_ratio/')
      out[ratio] = out[name] / norm if norm else 0.0
    return out


def norms(line: Mapping[str, float]) -> dict[str, float]:
  """The Frobenius norms of a line, to be kept as `initial`."""
  return {k: v for k, v in line.items() if k.startswith(NORM)}


@functools.lru_cache(maxsize=8)
def _compiled(config: Config, everywhere: jax.NamedSharding) -> Callable:
  return jax.jit(functools.partial(_measure, config), out_shardings=everywhere)


def _measure(config: Config, params, moe_state, h, batch):
  """Scalars, and arrays [L] or [L, N], by name."""
  rule = init_rules.make_rule(config.init, config.model)
  boxed = model.abstract_params(config.model, rule)
  out = condensation_tree.tree_metrics(params, layers.declarations(boxed))
  _, seen = train_step.transformer(config).apply(
    {'params': params, moe.STATE: moe_state},
    batch['inputs'],
    batch['segment_ids'],
    batch['positions'],
    h.norm_eps,
    mutable=[model.PROBE, attention.MECHANICS],
  )
  blocks = seen[attention.MECHANICS]['blocks']
  heads = blocks['attn']
  out['sink/share'] = heads['sink_share']  # [L, N]
  for name in ('entropy', 'entropy_share', 'gate_mean', 'gate_closed'):
    if name in heads:
      out[f'sink/{name}'] = jnp.mean(heads[name], axis=1)
  out['sink/max_activation'] = blocks['max_activation']
  sizes = seen[model.PROBE]['blocks']
  for branch in ('attn', 'mlp'):
    ratio = sizes[f'{branch}_branch_ms'] / sizes[f'{branch}_stream_ms']
    out[f'residual/{branch}'] = jnp.sqrt(ratio)
  return out


def _random_ranks(declarations: Mapping[str, layers.Declared]):
  """Stable rank of an i.i.d. Gaussian of each matrix' shape."""
  fans = {
    label: (declarations[path].fan_out, declarations[path].fan_in)
    for path, label in condensation_tree.labels(declarations).items()
  }
  return {
    f'condense/stable_rank_random/{label}': condensation.random_stable_rank(*d)
    for label, d in fans.items()
  }

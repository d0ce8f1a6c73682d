"""Condensation of every matrix of a model, by name, from its declarations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gamma_jax import init_rules, shapes
from gamma_jax.analysis import condensation


def tree_metrics(
  params: Any,
  declarations: Mapping[str, Any],
  limit: int = condensation.LIMIT,
) -> dict[str, jax.Array]:
  """`condensation.matrix_metrics` of every matrix of a model.

  Args:
    params: tree of dicts of arrays.
    declarations: parameter path -> its box, from `layers.declarations`.
    limit: most neurons of a matrix whose cosines are taken.

  Returns:
    'condense/stable_rank/q/0' -> scalar: metric, kind, layer. Matrices outside
    the blocks have no layer; experts are averaged. Where several parameters
    are of one kind, the path takes its place ('blocks.moe.shared.up.kernel').

  Raises:
    ValueError: a parameter whose shape contradicts its declaration.
  """
  named = labels(declarations)
  groups: dict[tuple[int, ...], list] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = '/'.join(p.key for p in path)
    if name not in named:
      continue
    declared = declarations[name]
    matrices = condensation.as_matrix(
      leaf, declared_axes(declared, leaf.shape, name)
    )
    entry = named[name], _stacked(declared), matrices
    groups.setdefault(matrices.shape[-2:], []).append(entry)
  out = {}
  for group in groups.values():
    out |= _group_metrics(group, limit)
  return out


def labels(declarations: Mapping[str, Any]) -> dict[str, str]:
  """Parameter path -> its name in metrics: its kind, where that is unique.

  Norm scales are no matrices and are left out.
  """
  kinds = [d.kind for d in declarations.values()]
  return {
    path: d.kind if kinds.count(d.kind) == 1 else path.replace('/', '.')
    for path, d in declarations.items()
    if d.kind in init_rules.ROLE_OF_KIND
  }


def declared_axes(declared: Any, shape: tuple[int, ...], name: str = ''):
  """`shapes.Axes` of a parameter, from its box and full shape.

  Every kernel is [*batch, *in, *out] and the embedding [*batch, out, in]; the
  declared fans say where to cut.

  Raises:
    ValueError: no cut of the shape gives the declared fans.
  """
  first, last = declared.fan_in, declared.fan_out
  if declared.kind == 'embed':
    first, last = last, first
  axes = range(len(shape))
  # The layer axis is known by name: with one layer its size tells nothing.
  for start in axes[_stacked(declared) :]:
    for cut in axes[start + 1 :]:
      halves = math.prod(shape[start:cut]), math.prod(shape[cut:])
      if halves == (first, last):
        pair = tuple(axes[start:cut]), tuple(axes[cut:])
        ins, outs = pair[::-1] if declared.kind == 'embed' else pair
        return shapes.Axes(ins, outs, tuple(axes[:start]))
  raise ValueError(
    f'parameter {name} of shape {shape} has no axes with d_in '
    f'{declared.fan_in} and d_out {declared.fan_out}, as declared'
  )


def _stacked(declared: Any) -> bool:
  return declared.names[0] == 'layers'


def _group_metrics(group, limit: int) -> dict[str, jax.Array]:
  """Metrics of parameters of one matrix shape, compiled once for all.

  Args:
    group: (label, stacked, matrices [*batch, d_out, d_in]) of each.
    limit: see `tree_metrics`.
  """
  shape = group[0][2].shape[-2:]
  flat = [matrices.reshape(-1, *shape) for _, _, matrices in group]
  # vmap would hold the iterates of all matrices at once.
  values = jax.lax.map(
    lambda w: condensation.matrix_metrics(w, limit), jnp.concatenate(flat)
  )
  out, start = {}, 0
  for (label, stacked, matrices), rows in zip(group, flat, strict=True):
    for metric, all_values in values.items():
      name = f'condense/{metric}/{label}'
      value = all_values[start : start + len(rows)]
      if not stacked:
        out[name] = jnp.mean(value)
        continue
      by_layer = value.reshape(len(matrices), -1).mean(axis=1)
      out |= {f'{name}/{i}': x for i, x in enumerate(by_layer)}
    start += len(rows)
  return out

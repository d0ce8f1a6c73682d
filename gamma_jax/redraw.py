"""Redraws the weights of a finished model from N(0, d_in^(-2 gamma))."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gamma_jax import initializers, tree_rules


def reinit(
  params: Any,
  key: jax.Array,
  gamma: initializers.Scalar,
  rules: Mapping[str, tree_rules.Rule],
  *,
  exempt: Sequence[str] = (),
  distribution: str = 'normal',
) -> Any:
  """Redraws every parameter from N(0, d_in^(-2 gamma)).

  A draw depends on `key`, the path and the shape alone: other parameters may
  come and go, and another gamma rescales the same directions.

  Args:
    params: as in `audit`; dtype and sharding of each array are kept.
    key: JAX random key.
    gamma: exponent; may be traced.
    rules: as in `audit`.
    exempt: as in `audit`. Exempt parameters are returned as they are.
    distribution: 'normal' or 'truncated_normal'; the std is the same.

  Returns:
    A tree like `params`.

  Raises:
    AuditError: as in `audit`.
    ValueError: gamma not finite, or unknown distribution.
  """
  tree_rules.check_gamma(gamma)
  leaves, treedef = tree_rules.assign(params, rules, exempt)

  def new(leaf: tree_rules.Leaf):
    if leaf.axes is tree_rules.EXEMPT:
      return leaf.box
    value = _redraw(leaf, key, gamma, distribution)
    return jax.tree.map(lambda _: value, leaf.box)

  return treedef.unflatten(new(leaf) for leaf in leaves)


def _redraw(leaf: tree_rules.Leaf, key: jax.Array, gamma, distribution: str):
  # Eight bytes of a hash that does not change between runs, unlike `hash`.
  digest = hashlib.blake2b(leaf.path.encode(), digest_size=8).digest()
  for word in np.frombuffer(digest, '<u4'):
    key = jax.random.fold_in(key, word)
  value = leaf.value
  # A tracer has no placement yet; an array that JAX may move stays movable.
  placed = isinstance(value, jax.Array) and getattr(value, 'committed', False)
  draw = _drawer(
    tuple(value.shape),
    value.dtype,
    distribution,
    value.sharding if placed else None,
  )
  new = draw(key, initializers.gamma_std(leaf.d_in, gamma))
  if isinstance(value, np.ndarray) and not isinstance(new, jax.core.Tracer):
    return np.asarray(new)
  return new


@functools.cache
def _drawer(shape, dtype, distribution: str, sharding):
  """One compiled draw per kind of array, made where it is to live."""

  def draw(key, std):
    return initializers.scaled_normal(std, distribution)(key, shape, dtype)

  return jax.jit(draw, out_shardings=sharding)

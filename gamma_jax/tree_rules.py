"""Which rule covers which parameter of a model that somebody else wrote.

The model is a finished tree of arrays: a dict, a FrozenDict, an nnx.State, any
pytree. Its author guessed each fan-in; here the user states it, by path:

  rules = {
    'embed/embedding': Axes(in_axis=(1,), out_axis=(0,)),
    'layers/*/**/kernel': Axes(in_axis=(0,), out_axis=(1,)),
    '**/bias': EXEMPT,
  }
  audit(params, rules, gamma=1.0).raise_if_off()
  params = reinit(params, jax.random.key(0), 1.0, rules)

A path is the keys from the root joined by '/'. In a pattern, `*`, `?` and
`[...]` match inside one part as in fnmatch, case-sensitively; a part `**`
matches any number of parts, also none. Every parameter must be covered by
exactly one pattern, and every pattern must cover something.

Of an NNX model pass `nnx.state(model, nnx.Param)`, and put the result back
with `nnx.update`. Flax is not imported.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gamma_jax import initializers, shapes


class AuditError(ValueError):
  """Rules that do not fit the tree, or weights that do not fit the rule."""


@dataclasses.dataclass(frozen=True)
class Exempt:
  """What a rule says of a parameter that keeps its value (norms, biases)."""


EXEMPT = Exempt()
Rule = shapes.Axes | Exempt


@dataclasses.dataclass(frozen=True)
class Leaf:
  """A parameter and its rule; `box` is the wrapper around `value`, or it."""

  path: str
  box: Any
  value: Any
  axes: Rule
  d_in: int


def assign(
  params: Any, rules: Mapping[str, Rule], exempt: Sequence[str]
) -> tuple[list[Leaf], Any]:
  """Gives each parameter the one rule that covers it.

  Returns:
    One Leaf per parameter in the order of the tree, and the tree's structure,
    whose leaves are the boxes.

  Raises:
    AuditError: the rules do not fit the tree; see `audit`.
  """
  pairs = [*rules.items(), *((pattern, EXEMPT) for pattern in exempt)]
  for pattern, rule in pairs:
    if not isinstance(rule, Rule):
      raise AuditError(f'rule of {pattern!r} is {rule!r}: give Axes or EXEMPT')
  flat, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_box)
  paths = ['/'.join(map(_key_name, keys)) for keys, _ in flat]
  if not paths:
    raise AuditError('the tree has no parameters')
  repeated = [p for p, n in collections.Counter(paths).items() if n > 1]
  if repeated:
    raise AuditError(f'two parameters have the path {repeated[0]!r}')
  covering = {
    path: [pair for pair in pairs if _matches(pair[0], path)] for path in paths
  }
  used = {pattern for found in covering.values() for pattern, _ in found}
  for pattern, _ in pairs:
    if pattern not in used:
      near = difflib.get_close_matches(pattern, paths, n=1, cutoff=0)
      raise AuditError(
        f'pattern {pattern!r} covers no parameter; nearest path: {near[0]!r}'
      )
  leaves = [
    _leaf(path, box, covering[path])
    for path, (_, box) in zip(paths, flat, strict=True)
  ]
  return leaves, treedef


def _leaf(path: str, box: Any, found: list[tuple[str, Rule]]) -> Leaf:
  (value,) = jax.tree.leaves(box)
  if not found:
    raise AuditError(
      f'no pattern covers {path!r} of shape {np.shape(value)}: give its Axes, '
      'or EXEMPT for a norm or a bias'
    )
  if len(found) > 1:
    patterns = ' and '.join(repr(pattern) for pattern, _ in found)
    raise AuditError(f'{path!r} is covered more than once: by {patterns}')
  ((pattern, axes),) = found
  if isinstance(axes, Exempt):
    return Leaf(path, box, value, EXEMPT, 0)
  dtype = getattr(value, 'dtype', None)
  if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
    raise AuditError(f'{path!r} is {dtype or type(value)}, not floating point')
  try:
    d_in, _ = axes.fans(value.shape)
  except ValueError as error:
    raise AuditError(f'rule {pattern!r} on {path!r}: {error}') from None
  if not value.size:
    raise AuditError(f'{path!r} of shape {value.shape} has no elements')
  return Leaf(path, box, value, axes, d_in)


def _is_box(x: Any) -> bool:
  """True for nnx.Variable and Linen metadata boxes; Flax is not imported."""
  return hasattr(x, 'get_metadata') or hasattr(x, 'replace_boxed')


def _key_name(key: Any) -> str:
  for attribute in ('key', 'name', 'idx'):  # DictKey, GetAttrKey, SequenceKey
    if hasattr(key, attribute):
      return str(getattr(key, attribute))
  raise AuditError(f'cannot name the key {key!r} of the tree')


def _matches(pattern: str, path: str) -> bool:
  def match(globs: list[str], parts: list[str]) -> bool:
    if not globs:
      return not parts
    if globs[0] == '**':
      return any(match(globs[1:], parts[i:]) for i in range(len(parts) + 1))
    return (
      bool(parts)
      and fnmatch.fnmatchcase(parts[0], globs[0])
      and match(globs[1:], parts[1:])
    )

  return match(pattern.split('/'), path.split('/'))


def check_gamma(gamma: initializers.Scalar) -> None:
  """Raises AuditError for a number that is NaN or infinite."""
  if isinstance(gamma, (int, float)) and not math.isfinite(gamma):
    raise AuditError(f'gamma must be finite, got {gamma}')

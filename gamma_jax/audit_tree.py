"""Measures whether the weights of a finished model have the std asked.

What covers which parameter: tree_rules.py, which also has an example.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gamma_jax import initializers, tree_rules

# |z| above which a weight is off. A correct draw passes it once in 1.7 million,
# so a model of thousands of matrices and copies raises no false alarm.
Z_LIMIT = 5.0


@dataclasses.dataclass(frozen=True)
class Row:
  """One parameter of the report; NaN where a number means nothing.

  Attributes:
    path: keys joined by '/'.
    shape: full shape.
    verdict: 'ok', 'off' or 'exempt'.
    d_in: fan-in of one copy; 0 if exempt.
    asked: d_in^(-gamma).
    got: root mean square of all copies, i.e. the std about the asked mean 0.
    z: `z_score` of `got`.
    worst_copy: index on the batch axes of the copy that is furthest off.
    worst_z: its z.
    gamma: the exponent that `got` amounts to, -ln(got) / ln(d_in).
  """

  path: str
  shape: tuple[int, ...]
  verdict: str
  d_in: int = 0
  asked: float = math.nan
  got: float = math.nan
  z: float = math.nan
  worst_copy: tuple[int, ...] = ()
  worst_z: float = math.nan
  gamma: float = math.nan


@dataclasses.dataclass(frozen=True)
class AuditReport:
  """Every parameter with its verdict, in the order of the tree."""

  gamma: float
  rows: tuple[Row, ...]

  @property
  def ok(self) -> bool:
    """True when no parameter is off."""
    return all(row.verdict != 'off' for row in self.rows)

  @property
  def exempt_matrices(self) -> tuple[str, ...]:
    """Exempt parameters of two or more axes: matrices that escape gamma."""
    return tuple(
      row.path
      for row in self.rows
      if row.verdict == 'exempt' and len(row.shape) >= 2
    )

  def table(self) -> str:
    """Aligned plain text: one line per parameter, then the totals."""
    head = 'parameter|shape|d_in|std asked|std got|z|worst copy|gamma|verdict'
    cells = [head.split('|'), *(_cells(row) for row in self.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
      '  '.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))
      for line in cells
    ]
    count = collections.Counter(row.verdict for row in self.rows)
    lines.append(
      f'gamma {self.gamma:g}, limit |z| <= {Z_LIMIT:g}: {count["ok"]} ok, '
      f'{count["off"]} off, {count["exempt"]} exempt'
    )
    if self.exempt_matrices:
      lines.append(f'exempt matrices: {", ".join(self.exempt_matrices)}')
    return '\n'.join(line.rstrip() for line in lines)

  def raise_if_off(self) -> None:
    """Raises AuditError naming the parameter that is furthest off."""
    off = [row for row in self.rows if row.verdict == 'off']
    if off:
      worst = max(off, key=_distance)
      stack = f', worst {_worst_copy(worst)}' if worst.worst_copy else ''
      raise tree_rules.AuditError(
        f'{len(off)} of {len(self.rows)} parameters are off gamma '
        f'{self.gamma:g}; furthest {worst.path!r}: std {worst.got:.3g}, asked '
        f'{worst.d_in}^-{self.gamma:g} = {worst.asked:.3g} '
        f'(z {worst.z:+.1f}{stack})'
      )


def audit(
  params: Any,
  rules: Mapping[str, tree_rules.Rule],
  *,
  gamma: float,
  exempt: Sequence[str] = (),
) -> AuditReport:
  """Compares the std of every parameter with d_in^(-gamma).

  A stack (batch_axis) is judged as a whole and copy by copy, so that one bad
  layer among many is found.

  Args:
    params: tree of arrays; boxes (nnx.Param, linen.Partitioned) are seen
      through.
    rules: pattern -> its Axes, or EXEMPT.
    gamma: a concrete number.
    exempt: more patterns that are EXEMPT.

  Raises:
    AuditError: a pattern that covers nothing; a parameter covered by no
      pattern or by two; axes that do not fit a shape; a parameter that is not
      of a floating dtype.
  """
  gamma = float(gamma)
  tree_rules.check_gamma(gamma)
  leaves, _ = tree_rules.assign(params, rules, exempt)
  return AuditReport(gamma, tuple(_row(leaf, gamma) for leaf in leaves))


def z_score(ratio, n: int):
  """How many sigmas a root mean square of n normals is from the one asked.

  n ratio^2 is chi-squared; its cube root is nearly normal from n = 1 on
  (Wilson and Hilferty 1931). For large n this is (ratio - 1) sqrt(2 n). A
  truncated normal scatters less, so for it the score errs on the safe side.

  Args:
    ratio: rms / asked std; a number or an array.
    n: how many weights it was measured on.
  """
  variance = 2 / (9 * n)
  return (np.cbrt(np.square(ratio)) - (1 - variance)) / math.sqrt(variance)


def _row(leaf: tree_rules.Leaf, gamma: float) -> Row:
  shape = tuple(np.shape(leaf.value))
  if leaf.axes is tree_rules.EXEMPT:
    return Row(leaf.path, shape, 'exempt')
  if not isinstance(leaf.value, (jax.Array, np.ndarray)):
    raise tree_rules.AuditError(f'{leaf.path!r} has a shape but no values')
  asked = float(initializers.gamma_std(leaf.d_in, gamma))
  batch = sorted(axis % len(shape) for axis in leaf.axes.batch_axis)
  squares = _mean_squares(leaf.value, asked, batch)
  n = leaf.value.size
  z = float(z_score(math.sqrt(squares.mean()), n))
  copies = z_score(np.sqrt(squares), n // squares.size)
  # argmax of |z| takes a NaN first, as it should.
  worst = np.unravel_index(np.argmax(np.abs(copies)), copies.shape)
  worst_z = float(copies[worst])
  got = asked * math.sqrt(squares.mean())
  fits = abs(z) <= Z_LIMIT and abs(worst_z) <= Z_LIMIT  # False for NaN
  return Row(
    path=leaf.path,
    shape=shape,
    verdict='ok' if fits else 'off',
    d_in=leaf.d_in,
    asked=asked,
    got=got,
    z=z,
    worst_copy=tuple(int(i) for i in worst),
    worst_z=worst_z,
    gamma=_implied_gamma(got, leaf.d_in),
  )


def _implied_gamma(std: float, d_in: int) -> float:
  if d_in == 1:
    return math.nan  # 1^-gamma is 1 for every gamma
  return -math.log(std) / math.log(d_in) if std else math.inf


def _mean_squares(value: Any, asked: float, batch: list[int]) -> np.ndarray:
  """Mean of (w / asked)^2 per copy, in float64; shape is the batch axes."""
  rest = tuple(axis for axis in range(value.ndim) if axis not in batch)
  if not rest:
    return np.square(np.asarray(value, np.float64) / asked)
  # A float32 sum over a whole matrix loses digits that the z-score needs, so
  # the device sums one axis and the host the others.
  partial = _mean_square_along(value, 1 / asked, axis=rest[-1])
  return np.asarray(partial, np.float64).mean(axis=rest)


@functools.partial(jax.jit, static_argnames='axis')
def _mean_square_along(value, scale, *, axis: int) -> jax.Array:
  scaled = value.astype(jnp.float32) * jnp.float32(scale)
  return jnp.mean(jnp.square(scaled), axis=axis, keepdims=True)


def _cells(row: Row) -> list[str]:
  shape = 'x'.join(map(str, row.shape)) or 'scalar'
  if row.verdict == 'exempt':
    return [row.path, shape, *('-' * 6), row.verdict]
  numbers = [f'{row.asked:.5g}', f'{row.got:.5g}', f'{row.z:+.1f}']
  worst = _worst_copy(row) if row.worst_copy else '-'
  gamma = f'{row.gamma:.3f}'
  return [row.path, shape, str(row.d_in), *numbers, worst, gamma, row.verdict]


def _worst_copy(row: Row) -> str:
  return f'copy {",".join(map(str, row.worst_copy))}: {row.worst_z:+.1f}'


def _distance(row: Row) -> float:
  # NaN compares with nothing; it counts as infinitely far.
  return np.nan_to_num([abs(row.z), abs(row.worst_z)], nan=np.inf).max()

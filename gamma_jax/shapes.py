"""Which axes of a weight are contracted: the fan-in, read off an equation.

Pure strings and integers, no JAX. A layer states its equation once and both
the einsum and the initializer follow from it, so they cannot disagree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Axes:
  """The axes of one weight, each named exactly once.

  Attributes:
    in_axis: contracted with the input; their product is d_in.
    out_axis: created by the weight; their product is d_out.
    batch_axis: independent copies (layers, experts, population members).
  """

  in_axis: tuple[int, ...]
  out_axis: tuple[int, ...]
  batch_axis: tuple[int, ...] = ()

  def __post_init__(self):
    for field in dataclasses.fields(self):  # Axes(0, 1) is as good
      axis = getattr(self, field.name)
      axis = (axis,) if isinstance(axis, int) else tuple(axis)
      object.__setattr__(self, field.name, axis)

  def fans(self, shape: Sequence[int]) -> tuple[int, int]:
    """Returns (d_in, d_out) of `shape`.

    Raises:
      ValueError: an axis of `shape` is missing, repeated or out of range.
    """
    named = [
      _positive(a, len(shape))
      for a in (*self.in_axis, *self.out_axis, *self.batch_axis)
    ]
    if sorted(named) != list(range(len(shape))):
      raise ValueError(
        f'{self} must name every axis of shape {tuple(shape)} exactly once'
      )
    return (
      math.prod(shape[a] for a in self.in_axis),
      math.prod(shape[a] for a in self.out_axis),
    )


def weight_axes(equation: str) -> Axes:
  """Reads the axes of the second operand of `'x,w->y'`.

  A letter of w that y lacks is contracted (in); one that x lacks is made by w
  (out); one in all three is a batch axis: `EBCD,EDF->EBCF` is D in, F out,
  E batch.

  Raises:
    ValueError: not two operands, a repeated letter, or a letter of w that
      occurs nowhere else (it would be summed without being contracted).
  """
  operands, arrow, y = equation.replace(' ', '').partition('->')
  x, comma, w = operands.partition(',')
  if not arrow or not comma or ',' in w:
    raise ValueError(f"{equation!r} is not of the form 'x,w->y'")
  if len(set(w)) != len(w):
    raise ValueError(f'{equation!r} repeats a letter in the weight')
  axes = {'in': [], 'out': [], 'batch': []}
  for index, letter in enumerate(w):
    if letter not in x and letter not in y:
      raise ValueError(f'{equation!r} sums {letter!r} of the weight alone')
    kind = 'out' if letter not in x else 'batch' if letter in y else 'in'
    axes[kind].append(index)
  return Axes(tuple(axes['in']), tuple(axes['out']), tuple(axes['batch']))


def _positive(axis: int, ndim: int) -> int:
  if not -ndim <= axis < ndim:
    raise ValueError(f'axis {axis} is out of range for {ndim} dimensions')
  return axis % ndim

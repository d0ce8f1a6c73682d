"""Shares of right answers with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959963984540054  # two-sided 95 % quantile of the normal


def wilson(right: int, items: int) -> tuple[float, float]:
  """95 % interval of a share (Wilson 1927); holds near 0 and 1 too.

  Raises:
    ValueError: no items.
  """
  if not items:
    raise ValueError('no items')
  share, z2 = right / items, Z95**2 / items
  half = Z95 * math.sqrt(share * (1 - share) / items + z2 / (4 * items))
  low = (share + z2 / 2 - half) / (1 + z2)
  high = (share + z2 / 2 + half) / (1 + z2)
  # Rounding must not exclude a share of exactly 0 or 1.
  return max(min(low, share), 0.0), min(max(high, share), 1.0)


def rate(name: str, right: Sequence[bool]) -> dict:
  """{name: share, name_low, name_high}; the items are independent."""
  low, high = wilson(sum(right), len(right))
  share = sum(right) / len(right)
  return {name: share, f'{name}_low': low, f'{name}_high': high}

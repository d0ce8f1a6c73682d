"""L(N) = E + A N^-a: how a loss falls with size.

E is the floor, what no size removes. All sizes are fitted at once; N is
centred, so that the scale of the fit is a loss and not an astronomic number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import optimize

from gamma_jax import errors

_EXPONENT = (0.01, 3.0)
_STARTS = (0.05, 0.15, 0.3, 0.6, 1.2)
_FLAT = 1e-6  # share of the loss below which a fall is none
_TOUCH = 1e-3  # share of its range at which a parameter counts as at its bound


@dataclasses.dataclass(frozen=True)
class PowerLaw:
  """L(N) = E + A N^-a, fitted.

  Attributes:
    floor: E, nats.
    scale: the reducible part A N^-a at the geometric mean of `sizes`, nats.
    exponent: a.
    sizes: [S] fitted sizes, growing.
    residuals: [S] loss minus fit, nats.
    rms: root mean square of the residuals over S - 3 degrees of freedom; nan
      with three sizes, where the curve goes through every point.
    warnings: why not to trust the fit, in plain words.
  """

  floor: float
  scale: float
  exponent: float
  sizes: np.ndarray
  residuals: np.ndarray
  rms: float
  warnings: Sequence[str]

  def loss(self, size):
    """Fitted loss."""
    log = np.log(size) - np.log(self.sizes).mean()
    return self.floor + self.scale * np.exp(-self.exponent * log)

  def log_size(self, loss):
    """ln of the size with this loss; inf at the floor and below."""
    above = np.asarray(loss, float) - self.floor
    with np.errstate(divide='ignore'):
      log = np.log(np.maximum(above, 0) / self.scale)
    return np.log(self.sizes).mean() - log / self.exponent


def fit(
  losses: Mapping[float, float], stderr: Mapping[float, float] | None = None
) -> PowerLaw:
  """Least squares with E >= 0, best of several starts.

  Args:
    losses: size -> loss.
    stderr: size -> standard error of the loss; points weigh 1 / stderr^2. All
      weigh the same without.

  Raises:
    ConfigError: fewer than three sizes, numbers that are no loss or size, or a
      loss that does not fall with size.
  """
  sizes = np.array(sorted(losses), float)
  y = np.array([losses[size] for size in sizes], float)
  weights = _weights(sizes, y, stderr)
  log = np.log(sizes) - np.log(sizes).mean()
  if -np.polyfit(log, y, 1)[0] * np.ptp(log) < _FLAT * y.min():
    raise errors.ConfigError(
      'the loss does not fall with size; an effective size has no meaning here'
    )
  fits = [_least_squares(log, y, weights, exponent) for exponent in _STARTS]
  return _law(sizes, y, min(fits, key=lambda found: found.cost).x)


def refit(
  law: PowerLaw, y: np.ndarray, stderr: Mapping[float, float] | None = None
) -> PowerLaw:
  """Fit of other losses at the same sizes, started from `law` alone."""
  weights = _weights(law.sizes, y, stderr)
  log = np.log(law.sizes) - np.log(law.sizes).mean()
  found = _least_squares(log, y, weights, law.exponent)
  return _law(law.sizes, y, found.x)


def _law(sizes, y, found) -> PowerLaw:
  floor, log_scale, exponent = map(float, found)
  log = np.log(sizes) - np.log(sizes).mean()
  scale = math.exp(log_scale)
  residuals = y - floor - scale * np.exp(-exponent * log)
  free = len(sizes) - 3
  return PowerLaw(
    floor=floor,
    scale=scale,
    exponent=exponent,
    sizes=sizes,
    residuals=residuals,
    rms=math.sqrt(residuals @ residuals / free) if free else math.nan,
    warnings=_warnings(y, floor, exponent),
  )


def _weights(sizes, y, stderr) -> np.ndarray:
  if len(sizes) < 3:
    raise errors.ConfigError(
      f'a fit of three numbers needs three sizes or more, got {len(sizes)}'
    )
  numbers = np.concatenate([sizes, y])
  if not (np.isfinite(numbers).all() and (numbers > 0).all()):
    raise errors.ConfigError('sizes and losses must be positive and finite')
  if stderr is None:
    return np.ones(len(sizes))
  errs = np.array([stderr.get(size, math.nan) for size in sizes], float)
  if not (np.isfinite(errs).all() and (errs > 0).all()):
    raise errors.ConfigError('stderr must be positive at every fitted size')
  return np.exp(-2 * (np.log(errs) - np.log(errs).mean()))


def _least_squares(log, y, weights, exponent):
  """Best floor, log scale and exponent near a first `exponent`."""
  root = np.sqrt(weights)
  # Where the sizes are centred, A N^-a is a part of the loss: bounded by it.
  low = [0, math.log(_FLAT * y.min()), _EXPONENT[0]]
  high = [y.min(), math.log(y.max()), _EXPONENT[1]]

  def residual(p):
    return root * (p[0] + np.exp(p[1] - p[2] * log) - y)

  def jacobian(p):
    reducible = root * np.exp(p[1] - p[2] * log)
    return np.stack([root, reducible, -log * reducible], axis=1)

  # Given the exponent, the rest is a straight line.
  scale, floor = np.polyfit(np.exp(-exponent * log), y, 1)
  start = [floor, math.log(max(scale, _FLAT * y.min())), exponent]
  inside = 1e-3 * np.subtract(high, low)
  start = np.clip(start, low + inside, high - inside)
  # Tight: the defaults stop while the floor still moves in its third digit.
  return optimize.least_squares(
    residual,
    start,
    jacobian,
    (low, high),
    x_scale='jac',
    xtol=1e-12,
    ftol=1e-12,
  )


def _warnings(y, floor, exponent) -> list[str]:
  warnings = []
  if floor < _TOUCH * y.min():
    warnings.append(
      'E is at its bound 0: the sizes do not show where the loss levels off'
    )
  if floor > (1 - _TOUCH) * y.min():
    warnings.append('E is at the lowest loss: the largest sizes no longer gain')
  low, high = _EXPONENT
  if not low * (1 + _TOUCH) < exponent < high * (1 - _TOUCH):
    warnings.append(f'a is at its bound {exponent:.2g}: no power law fits')
  if len(y) == 3:
    warnings.append('three sizes fix the curve: nothing is left to test it')
  return warnings

"""How many times larger a baseline model would match the loss of an arm.

The baseline arm is fitted by a power law L(N). An arm with loss L at size N
matches the baseline of size N' where L(N') = L; its multiplier is N' / N.
Losses are nats per token; N counts parameters, with or without embeddings, but
the same way throughout: at small sizes the two give different multipliers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from gamma_jax import errors, results
from gamma_jax.analysis import paired, power_law

BEYOND = 4.0  # N' may leave the fitted sizes by this factor, not more
Losses = Mapping[float, Sequence[float]]  # size -> loss of each seed


@dataclasses.dataclass(frozen=True)
class Multiplier:
  """Effective size of the arm at one size; nan where refused.

  Attributes:
    size: N.
    loss: of the arm, mean over seeds.
    equal_size: N', of the baseline with that loss.
    multiplier: N' / N; 1.44 reads as 44 % larger.
    interval: 95 %; nan with one seed, upper end inf where the loss may be
      below what any baseline reaches.
    extrapolated: N' lies outside of the fitted sizes.
    refused: why there is no number, in plain words; empty otherwise.
  """

  size: float
  loss: float
  equal_size: float
  multiplier: float
  interval: tuple[float, float]
  extrapolated: bool
  refused: str


@dataclasses.dataclass(frozen=True)
class EffectiveSize:
  """The fit of the baseline and the multipliers read off it.

  Attributes:
    fit: of the baseline's mean losses.
    multipliers: one per size of the arm, growing.
    seeds: per size.
    indicative: fewer than three seeds: do not build on the intervals.
  """

  fit: power_law.PowerLaw
  multipliers: Sequence[Multiplier]
  seeds: int
  indicative: bool


def effective_size(
  baseline: Losses,
  arm: Losses,
  stderr: Mapping[float, float] | None = None,
  *,
  resamples: int = 1000,
  rng_seed: int = 0,
) -> EffectiveSize:
  """Size multipliers of an arm with intervals over seeds.

  Seeds are resampled jointly in both arms and at all sizes, since a seed shares
  its data order everywhere. The interval is a t interval of the log multiplier
  around the bootstrap's standard error: in simulations with 2 to 5 seeds it
  covered the truth 91 to 97 % of the time, percentiles 63 to 92 %. It knows
  of seeds, not of a wrong curve: read `fit.residuals` beside it.

  Args:
    baseline: at three sizes or more.
    arm: at any of the sizes or others; the same seeds in the same order.
    stderr: of the baseline's mean losses, as in `power_law.fit`.
    resamples: of the bootstrap.
    rng_seed: of the bootstrap.
  """
  seeds = _check_seeds(baseline, arm)
  fit = power_law.fit({n: np.mean(v) for n, v in baseline.items()}, stderr)
  sizes = np.array(sorted(arm), float)
  means = np.array([np.mean(arm[size]) for size in sizes])
  logs = fit.log_size(means) - np.log(sizes)
  low, high = _interval(
    logs, _resample(fit, baseline, arm, stderr, resamples, rng_seed), seeds
  )
  with np.errstate(over='ignore'):
    equal = np.exp(logs) * sizes
  multipliers = []
  for index, size in enumerate(sizes):
    equal_size = float(equal[index])
    refused = _refusal(fit, means[index], equal_size)
    inside = fit.sizes[0] <= equal_size <= fit.sizes[-1]
    interval = (float(low[index]), float(high[index]))
    multipliers.append(
      Multiplier(
        size=float(size),
        loss=float(means[index]),
        equal_size=math.nan if refused else equal_size,
        multiplier=math.nan if refused else equal_size / float(size),
        interval=(math.nan, math.nan) if refused else interval,
        extrapolated=not (refused or inside),
        refused=refused,
      )
    )
  return EffectiveSize(fit, multipliers, seeds, seeds < results.INDICATIVE)


def losses_by_size(
  pairs: paired.Pairs, parameters: Mapping[str, float], key: str = 'size'
) -> tuple[dict[float, list[float]], dict[float, list[float]], list[str]]:
  """Baseline and arm for `effective_size`, from two paired arms.

  Args:
    pairs: settings hold a seed and a size, nothing else that varies.
    parameters: N of each value of `key`.
    key: override that names the size.

  Returns:
    Both arms with the seeds that every size has; the cells left out, in words.
  """
  table: dict[str, dict[int, tuple[float, float]]] = {}
  for setting, a, b in zip(pairs.settings, pairs.a, pairs.b, strict=True):
    seeds = table.setdefault(setting[key], {})
    if setting['seed'] in seeds:
      raise errors.ConfigError(
        f'two pairs have {key}={setting[key]}, seed={setting["seed"]}; name '
        'what else varies in the arms'
      )
    seeds[setting['seed']] = (float(a), float(b))
  common = set.intersection(*(set(seeds) for seeds in table.values()))
  left = [
    f'{key}={size}, seed={seed}: not every size has this seed'
    for size, seeds in table.items()
    for seed in seeds
    if seed not in common
  ]
  both = [
    {
      parameters[size]: [seeds[seed][side] for seed in sorted(common)]
      for size, seeds in table.items()
    }
    for side in (0, 1)
  ]
  return both[0], both[1], left


def _check_seeds(baseline: Losses, arm: Losses) -> int:
  counts = {len(v) for v in (*baseline.values(), *arm.values())}
  if len(counts) != 1 or counts == {0}:
    raise errors.ConfigError(
      f'every size needs the same seeds in both arms, got {sorted(counts)}'
    )
  if not all(np.isfinite(v).all() for v in arm.values()):
    raise errors.ConfigError('losses of the arm must be finite')
  return counts.pop()


def _resample(fit, baseline, arm, stderr, resamples, rng_seed) -> np.ndarray:
  """[resamples, sizes of the arm] log multipliers."""
  sizes = sorted(arm)
  base = np.array([baseline[size] for size in fit.sizes])  # [S, seeds]
  other = np.array([arm[size] for size in sizes])
  seeds = base.shape[1]
  rng = np.random.default_rng(rng_seed)
  drawn = np.sort(rng.integers(seeds, size=(resamples, seeds)), axis=1)
  # Few seeds repeat few samples: 10 with 3 seeds. Fit each once.
  samples, index = np.unique(drawn, axis=0, return_inverse=True)
  logs = []
  for sample in samples:
    means = base[:, sample].mean(1)
    again = power_law.refit(fit, means, stderr)
    logs.append(again.log_size(other[:, sample].mean(1)) - np.log(sizes))
  return np.array(logs)[index]


def _interval(logs, drawn, seeds) -> tuple[np.ndarray, np.ndarray]:
  if seeds < 2:
    return np.full(len(logs), np.nan), np.full(len(logs), np.nan)
  finite = np.isfinite(drawn)
  spread = np.array(
    [
      np.std(column[ok]) if ok.any() else np.nan
      for column, ok in zip(drawn.T, finite.T, strict=True)
    ]
  )
  # A resampled mean varies less than the seeds do, by (seeds - 1) / seeds.
  spread *= math.sqrt(seeds / (seeds - 1))
  half = float(stats.t.ppf(0.975, seeds - 1)) * spread
  with np.errstate(over='ignore'):
    low, high = np.exp(logs - half), np.exp(logs + half)
  # A resample at the floor means that no size may be large enough.
  return low, np.where((~finite).mean(0) > 0.025, np.inf, high)


def _refusal(fit: power_law.PowerLaw, loss: float, equal_size: float) -> str:
  if loss <= fit.floor:
    return (
      f'loss {loss:.4f} is at or below the fitted floor {fit.floor:.4f} of the '
      'baseline: no size reaches it'
    )
  low, high = fit.sizes[0] / BEYOND, fit.sizes[-1] * BEYOND
  if not low <= equal_size <= high:
    return (
      f'equal size {equal_size:.3g} lies outside of {low:.3g} to {high:.3g}, '
      f'the fitted sizes and a factor of {BEYOND:g}: train more sizes'
    )
  return ''

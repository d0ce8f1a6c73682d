"""C4: weights condense early, then expand.

python -m experiments.c4_condense runs/ladder --out=experiments/records/DATE_c4
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from experiments import c1_loss, claim
from gamma_jax import metric_writer, results
from gamma_jax.analysis import paired

CLAIM = claim.Claim(
  title='C4: condensation, then expansion',
  claim=(
    'From gamma = 1 the weights first condense (stable rank falls far below '
    'that of the random start), then expand; from gamma = 0.5 they do not.'
  ),
  refuted_by=(
    'Paired by seed, the deepest dip of the stable rank (over its start) is no '
    'lower at gamma = 1 than at 0.5, or the rank does not rise after the dip.'
  ),
  command=c1_loss.CLAIM.command,
  minutes=c1_loss.CLAIM.minutes,
)
CARE = (
  'Geometric means over the q, k, v, o, up and down matrices of all layers, at '
  'the log-spaced steps that log.mechanics measures: the true dip may lie '
  'between two of them. '
) + c1_loss.CARE
KINDS = ('q', 'k', 'v', 'o', 'up', 'down')


def trajectory(cell: Path, kind: str = '') -> dict[int, float]:
  """step -> stable rank over its start, geometric mean over matrices.

  Args:
    cell: its folder.
    kind: of the matrices; '' takes all of KINDS.

  Raises:
    ValueError: the cell did not log its mechanics.
  """
  found: dict[int, dict[str, float]] = {}
  for line in metric_writer.read_metrics(cell / 'metrics.jsonl'):
    ranks = {k: v for k, v in line.items() if _matches(k, kind)}
    if ranks:
      found[line['step']] = ranks
  if 0 not in found:
    raise ValueError(f'{cell} has no mechanics; log.mechanics must be above 0')
  start = found[0]
  return {
    step: float(np.exp(np.mean([np.log(ranks[k] / start[k]) for k in start])))
    for step, ranks in found.items()
  }


def _matches(column: str, kind: str) -> bool:
  kinds = kind or '|'.join(KINDS)
  return bool(re.fullmatch(rf'condense/stable_rank/({kinds})/\d+', column))


def dips(
  workdir: Path, kind: str = ''
) -> dict[tuple[str, float], dict[int, tuple]]:
  """(size, gamma) -> seed -> (step of the dip, dip, end), over the start."""
  out: dict[tuple[str, float], dict[int, tuple]] = {}
  for row in results.collect(workdir):
    curve = trajectory(row.folder, kind)
    step = min(curve, key=curve.get)
    o = row.overrides
    arm = out.setdefault((o['size'], o['init.gamma']), {})
    arm[o['seed']] = (step, curve[step], curve[max(curve)])
  return out


def table(found: Mapping) -> list[str]:
  """One line an arm, and the two differences of a verdict below it."""
  lines = [
    '| size | gamma | step of the dip, each seed | dip / start | end / dip |',
    '| --- | ---: | ---: | ---: | ---: |',
  ]
  for (size, gamma), seeds in sorted(found.items()):
    step, dip, end = zip(*(seeds[s] for s in sorted(seeds)), strict=True)
    a = results.interval(dip)
    b = results.interval([e / d for e, d in zip(end, dip, strict=True)])
    steps = ' '.join(map(str, step))
    lines.append(
      f'| {size} | {gamma} | {steps} | {a.mean:.3f} ± {a.half:.3f} '
      f'| {b.mean:.3f} ± {b.half:.3f} |'
    )
  return lines


def by_kind(workdir: Path, size: str) -> list[str]:
  """One line a kind of matrix, at one size: which condense, which expand."""
  lines = [
    f'Size {size}, by matrix (dip / start, end / dip; means over seeds):',
    '',
    '| matrix | gamma 0.5 | gamma 1.0 |',
    '| --- | ---: | ---: |',
  ]
  for kind in KINDS:
    found = dips(workdir, kind)
    cells = []
    for gamma in (0.5, 1.0):
      _, dip, end = np.array(list(found[size, gamma].values())).T
      cells.append(f'{np.mean(dip):.3f}, {np.mean(end / dip):.3f}')
    lines.append(f'| {kind} | {cells[0]} | {cells[1]} |')
  return lines


def verdict(found: Mapping) -> str:
  """In words, of the dips of one sweep."""
  deeper, rises = [], []
  for size in dict.fromkeys(size for size, _ in found):
    small, usual = found[size, 1.0], found[size, 0.5]
    deeper.append(_logs(small, usual, lambda cell: cell[1]))
    rises.append(_logs(small, None, lambda cell: cell[2] / cell[1]))
  return (
    f'a deeper dip: {claim.verdict(deeper, -1)}; a rise after it: '
    f'{claim.verdict(rises, 1)}'
  )


def main() -> None:
  """Compares the dips of gamma 1 and 0.5, and asks for a rise after them."""
  workdirs, out = claim.parse_sweeps(CLAIM, __doc__)
  lines, verdicts = [], []
  for workdir in workdirs:
    claim.rows(workdir)
    found = dips(workdir)
    name = f'{workdir.name}: ' if len(workdirs) > 1 else ''
    verdicts.append(name + verdict(found))
    lines += [f'{workdir.name}:', '', *table(found), '']
    lines += [*by_kind(workdir, list(found)[-1][0]), '']
  pictures = {
    path.name
    for workdir in workdirs
    for name in ('stable_rank', 'mean_abs_cosine')
    for path in (workdir / 'report').glob(f'{name}*.png')
  }
  claim.record(
    CLAIM,
    workdirs,
    out,
    found='\n'.join(lines),
    words='. '.join(verdicts),
    care=CARE,
    pictures=sorted(pictures),
  )


def _logs(small, usual, number) -> paired.PairedDifference:
  """log of a number of each seed, at gamma = 1 minus at 0.5 (None: minus 0)."""
  seeds = sorted(small)
  return paired.paired_difference(
    [np.log(number(usual[s])) if usual else 0.0 for s in seeds],
    [np.log(number(small[s])) for s in seeds],
  )


if __name__ == '__main__':
  sys.exit(claim.call(main))

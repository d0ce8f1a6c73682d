"""C1: a small init lowers the loss.

python -m experiments.c1_loss runs/ladder --out=experiments/records/DATE_c1

Takes several sweeps; where one varies the learning rate, each gamma is taken
at its own best.
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments import claim
from gamma_jax.analysis import paired
from gamma_jax.analysis.paired import PairedDifference

CLAIM = claim.Claim(
  title='C1: loss at gamma = 1 against gamma = 0.5',
  claim=(
    'Drawing weights at gamma = 1 instead of 0.5 lowers the held-out loss at '
    'every size.'
  ),
  refuted_by=(
    'At some size the 95 % interval of loss(gamma = 1) - loss(gamma = 0.5), '
    'paired by seed, lies above 0.'
  ),
  command=(
    'python -m gamma_jax.main --config=configs/sweep_ladder.py '
    '--workdir=runs/ladder'
  ),
  minutes=20,
)
CARE = (
  'Models of 28 to 443 thousand non-embedding parameters on 2 MB of text as '
  "bytes unless said otherwise: this says nothing on the paper's numbers. One "
  'learning rate for all arms unless two are given: then each arm was tuned on '
  'the numbers that are compared. At these widths gamma = 0.5 is a std of 0.1 '
  'to 0.2.'
)
USUAL, SMALL = {'init.gamma': 0.5}, {'init.gamma': 1.0}


def compared(
  workdir: Path,
) -> tuple[list[str], list[PairedDifference], list[str]]:
  """(lines of the table, differences, warnings) of one sweep."""
  found = claim.tuned(workdir)
  lines, differences = [], []
  for c in paired.compare(found.rows, USUAL, SMALL):
    d = c.difference
    differences.append(d)
    seeds = paired.seeds_needed(d.sd, 0.01)
    rates = [found.rate({**c.setting, **arm}) for arm in (USUAL, SMALL)]
    lines.append(
      f'| {workdir.name} | {paired.words(c.setting)} | {", ".join(rates)} '
      f'| {claim.show(d)} | {d.p_value:.2g} | {seeds} |'
    )
  return lines, differences, [f'- {workdir.name}: {w}' for w in found.warnings]


def at_each_rate(workdir: Path) -> list[str]:
  """Lines of a table: both arms at the same rate; empty where one was run.

  They take no part in the verdict, but show what a single rate would have said.
  """
  if not claim.tuned(workdir).rates:
    return []
  return [
    f'| {workdir.name} | {paired.words(c.setting)} '
    f'| {claim.show(c.difference)} |'
    for c in paired.compare(claim.rows(workdir), USUAL, SMALL)
  ]


def main() -> None:
  """Compares the two arms at every size of every sweep."""
  workdirs, out = claim.parse_sweeps(CLAIM, __doc__)
  lines = [
    '| sweep | setting | best rates at 0.5, 1 | loss(1) - loss(0.5), nats | p '
    '| seeds for ±0.01 |',
    '| --- | --- | ---: | ---: | ---: | ---: |',
  ]
  differences, each, warnings = [], [], []
  same = [line for workdir in workdirs for line in at_each_rate(workdir)]
  if same:
    same = [
      'Both arms at the same rate (no part of the verdict):',
      '',
      '| sweep | setting | loss(1) - loss(0.5), nats |',
      '| --- | --- | ---: |',
      *same,
      '',
    ]
  for workdir in workdirs:
    more, found, warned = compared(workdir)
    lines += more
    warnings += warned
    differences += found
    each.append(f'{workdir.name}: {claim.verdict(found, -1)}')
  claim.record(
    CLAIM,
    workdirs,
    out,
    found='\n'.join([*lines, '', '; '.join(each) + '.', '', *same, *warnings]),
    words=claim.verdict(differences, -1),
    care=CARE,
    pictures=['loss.png', 'lr.png'],
  )


if __name__ == '__main__':
  sys.exit(claim.call(main))

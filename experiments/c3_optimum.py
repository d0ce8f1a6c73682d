"""C3: gamma = 1 is the best scale.

python -m experiments.c3_optimum runs/ladder --out=experiments/records/DATE_c3
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from experiments import c1_loss, claim
from gamma_jax.analysis import paired
from gamma_jax.analysis.paired import PairedDifference

GAMMA = 'init.gamma'
CLAIM = claim.Claim(
  title='C3: the optimum in gamma',
  claim='The loss is lowest at gamma = 1 and rises on both sides of it.',
  refuted_by=(
    'Another gamma of the grid has a loss below that of gamma = 1 by more than '
    'the 95 % interval of the paired difference.'
  ),
  command=c1_loss.CLAIM.command,
  minutes=c1_loss.CLAIM.minutes,
)
CARE = (
  c1_loss.CARE
  + ' The grid has three or four points: the optimum lies between them, '
  'and at these widths neighbouring gammas differ by a factor of 2 to 3 in std.'
)


def compared(workdir: Path) -> tuple[list[str], list[PairedDifference]]:
  """(lines of the table, differences) of one sweep, each gamma at its rate."""
  found = claim.tuned(workdir)
  gammas = sorted({row['overrides'][GAMMA] for row in found.rows})
  lines, differences = [], []
  for gamma in (g for g in gammas if g != 1.0):
    for c in paired.compare(found.rows, {GAMMA: gamma}, {GAMMA: 1.0}):
      differences.append(c.difference)
      mean = np.mean(
        [
          row['metrics']['heldout/loss']
          for row in found.rows
          if row['overrides'][GAMMA] == gamma
          and row['overrides'].get('size') == c.setting.get('size')
        ]
      )
      rates = [found.rate({**c.setting, GAMMA: g}) for g in (gamma, 1.0)]
      lines.append(
        f'| {workdir.name} | {paired.words(c.setting)} | {gamma} | {mean:.4f} '
        f'| {", ".join(rates)} | {claim.show(c.difference)} |'
      )
  return sorted(lines), differences


def main() -> None:
  """Compares gamma = 1 with every other gamma at every size."""
  workdirs, out = claim.parse_sweeps(CLAIM, __doc__)
  lines = [
    '| sweep | setting | gamma | loss | best rates at gamma, 1 '
    '| loss(1) - loss(gamma), nats |',
    '| --- | --- | ---: | ---: | ---: | ---: |',
  ]
  differences = []
  for workdir in workdirs:
    more, found = compared(workdir)
    lines += more
    differences += found
  claim.record(
    CLAIM,
    workdirs,
    out,
    found='\n'.join(lines),
    words=claim.verdict(differences, -1),
    care=CARE,
    pictures=['loss.png'],
  )


if __name__ == '__main__':
  sys.exit(claim.call(main))

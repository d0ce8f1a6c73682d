"""C1: a small init lowers the loss.

python -m experiments.c1_loss runs/ladder --out=experiments/records/DATE_c1

Takes several sweeps; where one varies the learning rate, each gamma is taken
at its own best.
"""

from __future__ import annotations

from pathlib import Path

from experiments import claim
from gamma_jax import errors, findings, results
from gamma_jax.analysis.paired import Overrides, PairedDifference, words

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


def rates(found: findings.Findings, setting: Overrides) -> str:
  """Best learning rates at gamma 0.5 and 1; '-' where one rate was run."""
  best = [
    entry.tuned['opt.lr']
    for arm in (USUAL, SMALL)
    for entry in found.entries
    if entry.arm == arm and entry.setting == setting and entry.tuned
  ]
  return ', '.join(f'{rate:g}' for rate in best) or '-'


def compared(workdir: Path) -> tuple[list[str], list[PairedDifference]]:
  """(lines of the table, differences) of one sweep.

  Raises:
    ConfigError: the sweep is not finished, or its first arm is not gamma = 0.5.
  """
  claim.rows(workdir)
  found = findings.find(results.collect(workdir))
  if found.baseline != USUAL:
    raise errors.ConfigError(
      f'{workdir}: the first arm is {words(found.baseline)}, not gamma = 0.5'
    )
  lines, differences = [], []
  for c in (c for c in found.compared if c.arm == SMALL):
    differences.append(c.difference)
    d = c.difference
    lines.append(
      f'| {workdir.name} | {words(c.setting)} | {rates(found, c.setting)} '
      f'| {claim.show(d)} | {d.p_value:.2g} | {c.seeds_needed} |'
    )
  return lines, differences


def main() -> None:
  """Compares the two arms at every size of every sweep."""
  workdirs, out = claim.parse_sweeps(CLAIM, __doc__)
  lines = [
    '| sweep | setting | best rates at 0.5, 1 | loss(1) - loss(0.5), nats | p '
    '| seeds for ±0.01 |',
    '| --- | --- | ---: | ---: | ---: | ---: |',
  ]
  differences, each = [], []
  for workdir in workdirs:
    more, found = compared(workdir)
    lines += more
    differences += found
    each.append(f'{workdir.name}: {claim.verdict(found, -1)}')
  claim.record(
    CLAIM,
    workdirs,
    out,
    found='\n'.join([*lines, '', '; '.join(each) + '.']),
    words=claim.verdict(differences, -1),
    care=CARE,
    pictures=['loss.png'],
  )


if __name__ == '__main__':
  main()

"""C7: a small init is worth a larger model.

  python -m experiments.c7_effective_size runs/ladder \
    --out=experiments/records/DATE_c7
"""

from __future__ import annotations

import sys

from experiments import c1_loss, claim
from gamma_jax import findings, report, report_tables, results

CLAIM = claim.Claim(
  title='C7: effective model size',
  claim=(
    'With both remedies in place, gamma = 1 is worth a gamma = 0.5 model that '
    'is about 44 % larger.'
  ),
  refuted_by=(
    'The 95 % interval of the size multiplier of gamma = 1 at the largest size '
    'lies at or below 1.'
  ),
  command=c1_loss.CLAIM.command,
  minutes=c1_loss.CLAIM.minutes,
)
CARE = (
  c1_loss.CARE + ' Three sizes fit a power law with an offset exactly, so the '
  'curve is not tested by this grid; where the fit refuses a number, that is '
  'the result.'
)


def main() -> None:
  """Reads the multipliers of the sweep's findings."""
  workdir, out = claim.parse(CLAIM, __doc__)
  claim.rows(workdir)
  found = findings.find(results.collect(workdir))
  words = claim.UNDECIDED
  for sized in found.sized:
    if sized.arm.get('init.gamma') != 1.0 or sized.found is None:
      continue
    largest = sized.found.multipliers[-1]
    low, high = largest.interval
    if not largest.refused and not sized.found.indicative:
      if low > 1:
        words = claim.SUPPORTED
      elif high <= 1:
        words = claim.CONTRADICTED
  notes = '\n'.join(report_tables.size_notes(found))
  pictures = sorted(p.name for p in (workdir / 'report').glob('size*.png'))
  claim.record(
    CLAIM,
    [workdir],
    out,
    found=report.as_markdown(report_tables.sized(found)) + '\n' + notes,
    words=words,
    care=CARE,
    pictures=pictures,
  )


if __name__ == '__main__':
  sys.exit(claim.call(main))

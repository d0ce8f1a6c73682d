"""C6: a small init composes where a usual one remembers.

python -m experiments.c6_anchor runs/anchor --out=experiments/records/DATE_c6
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import anchor_plot, claim
from gamma_jax import results
from gamma_jax.analysis import paired
from gamma_jax.analysis.paired import PairedDifference

SHARE = 'heldout/mirror/compositional'
SEEN = 'heldout/accuracy'
USUAL = 0.5
CLAIM = claim.Claim(
  title='C6: reasoning against memory (composite anchors)',
  claim=(
    'On an anchor pair that was held out, a small init answers by composing '
    'the two anchors; gamma = 0.5 answers like the mirror pair it remembers.'
  ),
  refuted_by=(
    'At some gamma above 0.5 that learns the seen pairs, the share of composed '
    'answers, paired by seed, lies below that of gamma = 0.5.'
  ),
  command=(
    'python -m gamma_jax.main --workdir=runs/anchor '
    '--config=configs/anchor.py:mlp=gelu,layers=2,wd=0.01,steps=1200 && '
    'python -m experiments.anchor_plot runs/anchor'
  ),
  minutes=8,
)
CARE = (
  'Models of two or four layers (L) and width 64, rows drawn fresh at every '
  'step. Seeds differ widely, so intervals are wide. An arm that does not '
  'reach 0.95 on seen pairs has not learned the task: its shares say nothing, '
  'and it takes no part in the verdict. No correction is made for the number '
  'of comparisons: what one of them shows is a guess until fresh seeds confirm '
  'it.'
)


def compared(workdir: Path) -> tuple[list[str], list[PairedDifference]]:
  """(lines of the table, differences that count) of one sweep."""
  rows = claim.rows(workdir)
  seen = collections.defaultdict(list)
  for row in rows:
    o = {k: v for k, v in row['overrides'].items() if k != 'seed'}
    seen[paired.json_key(o)].append(row['metrics'][SEEN])
  gammas = sorted({row['overrides']['init.gamma'] for row in rows})
  lines, counted = [], []
  for gamma in (g for g in gammas if g != USUAL):
    for c in paired.compare(
      rows, {'init.gamma': USUAL}, {'init.gamma': gamma}, SHARE
    ):
      learned = all(
        min(seen[paired.json_key({**c.setting, 'init.gamma': g})])
        >= anchor_plot.NEAR_ONE
        for g in (USUAL, gamma)
      )
      if learned and gamma > USUAL:
        counted.append(c.difference)
      lines.append(
        f'| {workdir.name} | {paired.words(c.setting)} | {gamma} '
        f'| {claim.show(c.difference, "+.3f")} | {"yes" if learned else "no"} |'
      )
  return sorted(lines), counted


def verdict(counted: Sequence[PairedDifference]) -> str:
  """In words, with how many comparisons say what."""
  above = sum(d.t_interval[0] > 0 for d in counted)
  below = sum(d.t_interval[1] < 0 for d in counted)
  return (
    f'{claim.verdict(counted, 1)}; of {len(counted)} comparisons in which both '
    f'arms learned the pairs, {above} lie above 0, {below} below, the others '
    'hold it'
  )


def main() -> None:
  """Compares every gamma with 0.5 in every setting of every sweep."""
  workdirs, out = claim.parse_sweeps(CLAIM, __doc__)
  tables, counted = [], []
  lines = [
    '| sweep | setting | gamma | composed(gamma) - composed(0.5) | learned |',
    '| --- | --- | ---: | ---: | --- |',
  ]
  for workdir in workdirs:
    more, differences = compared(workdir)
    lines += more
    counted += differences
    arms = results.summarize(results.collect(workdir))
    tables.append(f'{workdir.name}:\n\n{anchor_plot.table(arms)}')
  claim.record(
    CLAIM,
    workdirs,
    out,
    found='\n'.join([*tables, *lines]),
    words=verdict(counted),
    care=CARE,
    pictures=['anchor.png'],
  )


if __name__ == '__main__':
  sys.exit(claim.call(main))

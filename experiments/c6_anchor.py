"""C6: a small init composes where a usual one remembers.

python -m experiments.c6_anchor runs/anchor --out=experiments/records/DATE_c6
"""

from __future__ import annotations

import collections

from experiments import anchor_plot, claim
from gamma_jax import results
from gamma_jax.analysis import paired

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
  'Models of two layers and width 64, rows drawn fresh at every step. Seeds '
  'differ widely, so intervals are wide. An arm that does not reach 0.95 on '
  'seen pairs has not learned the task: its shares say nothing, and it takes '
  'no part in the verdict.'
)


def main() -> None:
  """Compares every gamma with 0.5 in every setting."""
  workdir, out = claim.parse(CLAIM, __doc__)
  rows = claim.rows(workdir)
  seen = collections.defaultdict(list)
  for row in rows:
    o = {k: v for k, v in row['overrides'].items() if k != 'seed'}
    seen[paired.json_key(o)].append(row['metrics'][SEEN])
  gammas = sorted({row['overrides']['init.gamma'] for row in rows})
  lines = [
    '| setting | gamma | composed(gamma) - composed(0.5) | learned |',
    '| --- | ---: | ---: | --- |',
  ]
  counted = []
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
        f'| {paired.words(c.setting)} | {gamma} '
        f'| {claim.show(c.difference, "+.3f")} | {"yes" if learned else "no"} |'
      )
  lines[2:] = sorted(lines[2:])
  arms = results.summarize(results.collect(workdir))
  found = '\n'.join([anchor_plot.table(arms), *lines])
  claim.record(
    CLAIM,
    workdir,
    out,
    found=found,
    words=claim.verdict(counted, 1),
    care=CARE,
    pictures=[workdir / 'report' / 'anchor.png'],
  )


if __name__ == '__main__':
  main()

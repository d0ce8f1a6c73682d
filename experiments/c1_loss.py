"""C1: a small init lowers the loss.

python -m experiments.c1_loss runs/ladder --out=experiments/records/DATE_c1
"""

from __future__ import annotations

from experiments import claim
from gamma_jax.analysis import paired

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
  'Models of 28 to 443 thousand non-embedding parameters, 500 updates on 2 MB '
  'of text as bytes, one learning rate for all arms: this says nothing on the '
  "paper's numbers. At these widths gamma = 0.5 is a std of 0.1 to 0.2."
)


def main() -> None:
  """Compares the two arms at every size."""
  workdir, out = claim.parse(CLAIM, __doc__)
  compared = paired.compare(
    claim.rows(workdir), {'init.gamma': 0.5}, {'init.gamma': 1.0}
  )
  lines = [
    '| setting | loss(1) - loss(0.5), nats | p | seeds for ±0.01 |',
    '| --- | ---: | ---: | ---: |',
  ]
  for c in compared:
    d = c.difference
    seeds = paired.seeds_needed(d.sd, 0.01)
    lines.append(
      f'| {paired.words(c.setting)} | {claim.show(d)} | {d.p_value:.2g} '
      f'| {seeds} |'
    )
  claim.record(
    CLAIM,
    workdir,
    out,
    found='\n'.join(lines),
    words=claim.verdict([c.difference for c in compared], -1),
    care=CARE,
    pictures=[workdir / 'report' / 'loss.png'],
  )


if __name__ == '__main__':
  main()

"""C5: the gain sits on tokens of medium to high difficulty.

python -m experiments.c5_tokens runs/ladder --out=experiments/records/DATE_c5
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends import backend_agg
from matplotlib.figure import Figure

from experiments import c1_loss, claim
from gamma_jax import report_style, results, tokens, trained
from gamma_jax.analysis import paired

BINS = 20
EASY, MIDDLE, HARDEST = slice(0, 5), slice(8, 19), slice(19, 20)
CLAIM = claim.Claim(
  title='C5: token difficulty',
  claim=(
    'The gain of gamma = 1 sits on tokens of medium to high difficulty, not on '
    'easy ones and not on the very hardest.'
  ),
  refuted_by=(
    'Over seeds, the mean gain in difficulty bins 9 to 19 of 20 is not above '
    'that of bins 1 to 5, or not above that of bin 20.'
  ),
  command=c1_loss.CLAIM.command,
  minutes=c1_loss.CLAIM.minutes,
)
CARE = (
  'Tokens are bytes here. Difficulty is the mean NLL of both arms, so a bin '
  'holds tokens on which one of the two was unlucky: the hardest bin is not '
  'free of that. One pair of models a seed, the largest size. '
) + c1_loss.CARE


def gains(workdir: Path) -> np.ndarray:
  """[seeds, BINS] gain of gamma = 1 over 0.5, nats per token."""
  found: dict[int, dict[float, Path]] = {}
  cells = results.collect(workdir)
  size = cells[-1].overrides['size']  # small sizes come first
  for row in cells:
    o = row.overrides
    if o['size'] == size:
      found.setdefault(o['seed'], {})[o['init.gamma']] = row.folder
  out = []
  for seed in sorted(found):
    a, b = (trained.load(found[seed][gamma]) for gamma in (1.0, 0.5))
    with tempfile.TemporaryDirectory() as folder:
      gap = tokens.compare(a, b, Path(folder) / 'gap', bins=BINS)
    out.append([b.gain.mean for b in gap.difficulty])
  return np.array(out)


def plot(gain: np.ndarray, path: Path) -> None:
  """Gain by bin: a thin line a seed, a thick one for the mean."""
  with matplotlib.rc_context(report_style.STYLE):
    figure = Figure(figsize=(6, 3.4), dpi=130, layout='constrained')
    backend_agg.FigureCanvasAgg(figure)
    ax = figure.subplots()
    x = np.arange(1, gain.shape[1] + 1)
    ax.axhline(0, color=report_style.GREY, lw=0.8)
    for line in gain:
      ax.plot(x, line, color='#0072b2', lw=0.7, alpha=0.6)
    ax.plot(x, gain.mean(0), color='#0072b2', lw=2)
    ax.set_xticks([1, 5, 10, 15, 20])
    ax.set_xlabel('bin of difficulty, 1 the easiest (mean NLL of both arms)')
    ax.set_ylabel('NLL(0.5) - NLL(1), nats per token')
    ax.set_title('Gain of gamma = 1; thin: each seed')
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
  """Scores the largest size of every seed and compares groups of bins."""
  workdir, out = claim.parse(CLAIM, __doc__)
  claim.rows(workdir)
  gain = gains(workdir)
  middle = gain[:, MIDDLE].mean(1)
  differences = {
    'bins 9-19 - bins 1-5': gain[:, EASY].mean(1),
    'bins 9-19 - bin 20': gain[:, HARDEST].mean(1),
  }
  lines = ['| bins of difficulty | gain, nats per token |', '| --- | ---: |']
  zero = np.zeros(len(gain))
  for name, at in (('1-5', EASY), ('9-19', MIDDLE), ('20', HARDEST)):
    d = paired.paired_difference(zero, gain[:, at].mean(1))
    lines.append(f'| {name} | {claim.show(d)} |')
  tests = []
  for name, other in differences.items():
    d = paired.paired_difference(other, middle)
    tests.append(d)
    lines.append(f'| {name} | {claim.show(d)} |')
  plot(gain, out / 'gain_by_difficulty.png')
  words = (
    f'more than on easy tokens: {claim.verdict(tests[:1], 1)}; more than on '
    f'the hardest: {claim.verdict(tests[1:], 1)}'
  )
  found = '\n'.join([*lines, '', '![gain](gain_by_difficulty.png)'])
  claim.record(CLAIM, [workdir], out, found=found, words=words, care=CARE)


if __name__ == '__main__':
  sys.exit(claim.call(main))

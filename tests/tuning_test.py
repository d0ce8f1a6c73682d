"""The best learning rate of each arm, and warnings at the edge of a grid."""

import math

import pytest

from gamma_jax import errors
from gamma_jax.analysis import paired, tuning

LRS, GAMMAS = (1e-3, 2e-3, 4e-3), (0.5, 0.75, 1.0)


def rows(loss, gammas=GAMMAS, lrs=LRS, seeds=2, **other):
  """One row a cell with `loss(gamma, lr)` and an offset of the seed."""
  return [
    {
      'overrides': {'init.gamma': g, 'opt.lr': lr, 'seed': s, **other},
      'metrics': {'heldout/loss': loss(g, lr) + 0.01 * s},
    }
    for g in gammas
    for lr in lrs
    for s in range(seeds)
  ]


def bowl(best_lr, best_gamma=0.75):
  return lambda g, lr: (
    3 + abs(math.log2(lr / best_lr)) + 0.1 * abs(g - best_gamma)
  )


def test_each_arm_gets_its_own():
  def loss(g, lr):
    return bowl(2e-3 if g < 1 else 1e-3)(g, lr)

  best, warnings = tuning.best_per_arm(rows(loss), 'init.gamma')
  assert [b.tuned['opt.lr'] for b in best] == [2e-3, 2e-3, 1e-3]
  assert best[1] == tuning.Best(
    {'init.gamma': 0.75, 'opt.lr': 2e-3}, {'opt.lr': 2e-3}, best[1].mean, 2
  )
  assert best[1].mean == pytest.approx(3.005)
  assert warnings == [
    'Lowest loss for gamma=1.0 at opt.lr=0.001, the smallest of 3 values: the '
    'best may lie outside of the grid.'
  ]
  pairs = paired.pair(rows(loss), best[0].overrides, best[2].overrides)
  assert len(pairs.settings) == 2 and not pairs.unpaired


def test_one_lucky_seed_does_not_decide():
  cells = rows(bowl(2e-3), GAMMAS[:1])
  cells[0]['metrics'] = {'heldout/loss': 2.9}  # lr 1e-3; its other is 4.035
  best, _ = tuning.best_per_arm(cells, 'init.gamma')
  assert best[0].tuned == {'opt.lr': 2e-3}


def test_no_warning_inside_of_the_grid():
  assert not tuning.best_per_arm(rows(bowl(2e-3)), 'init.gamma')[1]


@pytest.mark.parametrize(
  ('gammas', 'side'),
  [((0.75, 1.0, 1.25), 'small'), ((0.25, 0.5, 0.75), 'larg')],
)
def test_best_gamma_on_the_edge(gammas, side):
  _, warnings = tuning.best_per_arm(rows(bowl(2e-3), gammas), 'init.gamma')
  assert len(warnings) == 1
  assert f'at init.gamma=0.75, the {side}est of 3' in warnings[0]


def test_two_gammas_are_a_comparison_and_two_rates_are_a_search():
  _, warnings = tuning.best_per_arm(
    rows(bowl(2e-3), GAMMAS[:2], LRS[:2]), 'init.gamma'
  )
  assert ['opt.lr=0.002, the largest of 2' in w for w in warnings] == [True] * 2


def test_sizes_have_their_own_best():
  cells = rows(bowl(1e-3), size='tiny') + rows(bowl(4e-3, 0.5), size='small')
  best, warnings = tuning.best_per_arm(cells, 'init.gamma')
  assert [b.tuned['opt.lr'] for b in best] == [1e-3] * 3 + [4e-3] * 3
  assert best[0].overrides == {
    'init.gamma': 0.5,
    'size': 'tiny',
    'opt.lr': 1e-3,
  }
  assert 'for size=small at init.gamma=0.5, the smallest' in warnings[-1]


def test_a_value_with_fewer_seeds_cannot_win():
  cells = rows(bowl(2e-3), GAMMAS[:1])
  cells[0]['metrics'] = {'heldout/loss': 0.0}  # lr 1e-3, seed 0
  cells[1]['metrics'] = {'heldout/loss': math.nan}  # its other seed diverged
  best, warnings = tuning.best_per_arm(cells, 'init.gamma')
  assert best[0].tuned == {'opt.lr': 2e-3}
  assert warnings == [
    'gamma=0.5, lr=0.001, seed=1: heldout/loss is missing or not finite; left '
    'out',
    'gamma=0.5, lr=0.001: 1 of 2 seeds finished; not considered',
  ]


def test_sweep_without_a_rate_and_with_rules():
  cells = rows(bowl(2e-3), lrs=(2e-3,))
  for cell in cells:
    del cell['overrides']['opt.lr']
  for loss, name in enumerate(('he', 'gpt2', 'xavier')):
    cells.append(
      {
        'overrides': {'init.rule': name, 'seed': 0},
        'metrics': {'heldout/loss': 2.0 + (loss - 1) ** 2},
      }
    )
  best, warnings = tuning.best_per_arm(cells, 'init.gamma')
  assert len(best) == 6 and not warnings
  assert best[3] == tuning.Best({'init.rule': 'he'}, {}, 3.0, 1)
  assert not tuning.best_per_arm(cells, 'init.rule')[1]  # names have no edge
  for cell in cells:
    cell['metrics'] = {}
  with pytest.raises(errors.ConfigError, match='finite heldout/loss'):
    tuning.best_per_arm(cells, 'init.gamma')

"""Do norm epsilon and gate widen the gain of a small init? A 2 x 3 x 2 grid.

  python -m gamma_jax.main --config=configs/obstacles.py \
    --workdir=runs/obstacles

gamma 0.5 and 1.0, with and without a gate, at three epsilons and two sizes of
configs/sweep_ladder.py; 72 cells of 300 updates, a quarter of an hour on two
quiet cores. An epsilon leaves sqrt(v / (v + eps)) of the scale, v being
D^(-2 gamma): at D = 48 the usual 1e-5 leaves 99 %, so 1e-3 stands in for what
1e-5 does at D = 512 (55 % and 53 %).
"""

from configs import common, sweep_ladder

EPSILONS = (1e-12, 1e-5, 1e-3)


def _arguments(arg):
  return common.parse_arg(arg, seeds=3, sizes=('s', 'm'), steps=300)


def get_config(arg=None):
  """Arguments: seeds (how many), sizes (s+m+l), steps."""
  config = sweep_ladder.get_config()
  config.train.steps = _arguments(arg)['steps']
  return config


def sweep(add, arg=None):
  """Every gate, epsilon and gamma at every size."""
  arguments = _arguments(arg)
  for name in arguments['sizes']:
    for gate in ('none', 'elementwise'):
      for eps in EPSILONS:
        for gamma in (0.5, 1.0):
          for seed in range(arguments['seeds']):
            add(
              sweep_ladder.rung(name),
              {'model.gate': gate},
              {'model.norm_eps': eps},
              {'init.gamma': gamma},
              seed=seed,
            )

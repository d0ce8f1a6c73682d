"""Small but whole: three gammas and a fixed std on the sample text.

  python -m gamma_jax.main --config=configs/sweep_tiny.py --workdir=runs/tiny
  ... --config=configs/sweep_tiny.py:mlp=swiglu,seeds=3

8 cells of 0.6 M parameters, 400 updates of 1024 tokens each: some minutes on
two CPU cores. Expect a table of held-out loss by arm with the difference to
gamma=0.5 paired by seed, and a plot under runs/tiny/report. A model this small,
trained this briefly, shows that the machinery works, not which gamma is best:
widths of 64 keep the arms within a factor 8 of one another. `mlp` is gelu here
because its balance point is gamma = 1, while that of swiglu is 3/4.
"""

from configs import base, common

MLPS = ('gelu', 'swiglu')


def _arguments(arg):
  arguments = common.parse_arg(arg, mlp='gelu', seeds=2)
  common.choice('mlp', arguments['mlp'], MLPS)
  return arguments


def get_config(arg=None):
  """Arguments: mlp (gelu | swiglu), seeds (how many)."""
  config = base.get_config()
  config.model.mlp = _arguments(arg)['mlp']
  config.train.steps = 400
  return config


def sweep(add, arg=None):
  """gamma 0.5, 0.75, 1.0 and the usual fixed std, with the same seeds."""
  for seed in range(_arguments(arg)['seeds']):
    for gamma in (0.5, 0.75, 1.0):
      add({'init.gamma': gamma}, seed=seed)
    add({'init.rule': 'fixed', 'init.std': 0.02}, seed=seed)

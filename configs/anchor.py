"""Composed or remembered? The composite-anchor task over gamma and decay.

  python -m gamma_jax.main --workdir=runs/anchor \
    --config=configs/anchor.py:mlp=gelu,layers=2,wd=0.01
  python -m experiments.anchor_plot runs/anchor

The task of Zhang et al. 2024 (arXiv 2405.05409), as gamma_jax/data/anchor.py
draws it. Expect in results.csv the accuracy on pairs of anchors that were
trained, at positions that were not, and what the pair (4, 3), never trained,
is answered: composed (x - 10), as its mirror (x - 6), or otherwise. A share of
the mirror says something only where that accuracy is near 1.

One cell is a small decoder without a gate. All arguments at their defaults are
180 cells; the command above is 15 of them, one shape, so one program: at most
some 20 minutes on two cores (a step took 35 to 55 ms of a core that was shared
with other work). Pairs are learned within 500 to 1250 steps from gamma 0.5 up.
`first` is the first seed: what a grid has shown is confirmed on fresh ones.
"""

from configs import base, common

MLPS = ('gelu', 'swiglu')


def _arguments(arg):
  arguments = common.parse_arg(
    arg,
    mlp=MLPS,
    layers=('2', '4'),
    wd=('0.01', '0.1', '1.0'),
    gamma=('0.3', '0.5', '0.65', '0.8', '1.0'),
    seeds=3,
    first=0,
    steps=3000,
  )
  for name in arguments['mlp']:
    common.choice('mlp', name, MLPS)
  for key, kind in (('layers', int), ('wd', float), ('gamma', float)):
    arguments[key] = common.numbers(key, arguments[key], kind)
  return arguments


def get_config(arg=None):
  """Arguments: mlp, layers, wd, gamma (a+b), seeds (how many), first, steps."""
  steps = _arguments(arg)['steps']
  config = base.get_config()
  config.model.D = 64
  config.model.F = 128
  config.model.N = 4
  config.model.K = 4
  config.model.H = 16
  config.model.V = 112  # numbers to 109; a multiple of 16 to divide by devices
  config.model.gate = 'none'
  config.model.scan = False  # faster where layers are few
  config.opt.lr = 2e-3
  config.opt.warmup_steps = steps // 20
  config.train.steps = steps
  config.train.batch_size = 128
  config.train.seq_len = 9
  config.train.loss_chunk = 128 * 9  # logits of a batch at once
  config.data.source = 'anchor'
  config.data.tokenizer = 'none'
  config.eval.batch_size = 1024
  config.checkpoint.every = 1000
  config.log.every = 50
  return config


def sweep(add, arg=None):
  """Every gamma with the same seeds; cells of one shape stand together."""
  a = _arguments(arg)
  for mlp in a['mlp']:
    for layers in a['layers']:
      for decay in a['wd']:
        for gamma in a['gamma']:
          for seed in range(a['first'], a['first'] + a['seeds']):
            add(
              {'model.mlp': mlp},
              {'model.L': layers},
              {'opt.weight_decay': decay},
              {'init.gamma': gamma},
              seed=seed,
            )

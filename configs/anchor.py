"""Reasoning against memory: the composite-anchor task over gamma.

  python -m gamma_jax.main --config=configs/anchor.py --workdir=runs/anchor
"""

from configs import base, common

MLPS = ('gelu', 'swiglu')
GAMMAS = ('0.3', '0.5', '0.65', '0.8', '1.0')


def _arguments(arg):
  arguments = common.parse_arg(
    arg,
    mlp=('gelu',),
    layers=('2',),
    wd=('0.01',),
    gamma=GAMMAS,
    seeds=3,
    steps=4000,
  )
  for name in arguments['mlp']:
    common.choice('mlp', name, MLPS)
  return arguments


def get_config(arg=None):
  """Arguments: mlp, layers, wd, gamma (a+b each), seeds (how many), steps."""
  config = base.get_config()
  config.model.V = 112  # numbers to 109, made even for devices
  config.model.gate = 'none'
  config.model.K = 4
  config.opt.b2 = 0.999
  config.opt.lr = 1e-3
  config.opt.final_lr_fraction = 0.1
  config.train.steps = _arguments(arg)['steps']
  config.opt.warmup_steps = config.train.steps // 20
  config.train.batch_size = 256
  config.train.seq_len = 9
  config.train.loss_chunk = 256 * 9
  config.data.source = 'anchor'
  config.data.tokenizer = 'none'
  config.eval.batch_size = 1024
  config.checkpoint.every = 1000
  config.log.every = 100
  return config


def sweep(add, arg=None):
  """Every gamma with the same seeds, cells of one shape after one another."""
  a = _arguments(arg)
  for mlp in a['mlp']:
    for layers in a['layers']:
      for wd in a['wd']:
        for gamma in a['gamma']:
          for seed in range(a['seeds']):
            add(
              {'model.mlp': mlp},
              {'model.L': int(layers)},
              {'opt.weight_decay': float(wd)},
              {'init.gamma': float(gamma)},
              seed=seed,
            )

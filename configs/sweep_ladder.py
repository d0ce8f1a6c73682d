"""Three sizes, four gammas, three seeds: a ladder for two CPU cores.

  python -m gamma_jax.main --config=configs/sweep_ladder.py \
    --workdir=runs/ladder

36 cells on the sample text as bytes, 500 updates of 1024 bytes each; cells of
one size train together. Well under an hour on two cores. Expect loss against
gamma for each size, differences paired by seed, and the effective size of each
gamma against gamma = 0.5 where the curves allow one. Bytes keep the vocabulary
small, so that the blocks are what grows. `mlp` is gelu unless the argument says
swiglu. With several learning rates the report takes each gamma at its own best:

  ... --config=configs/sweep_ladder.py:sizes=m,lr=0.001+0.002+0.004+0.008

  size  non-embedding parameters (gelu, elementwise gate)
  s     27,864
  m     111,024
  l     443,232
"""

from configs import base, common

MLPS = ('gelu', 'swiglu')
VOCABULARIES = {'bytes': 257, 'bpe4k': 4096}  # bytes and the end of a text
# Four heads of D / 4 channels, two kv heads, F = 4 D.
WIDTHS = {'s': 24, 'm': 48, 'l': 96}


def _arguments(arg):
  arguments = common.parse_arg(
    arg,
    mlp='gelu',
    seeds=3,
    sizes=tuple(WIDTHS),
    gammas=('0.5', '0.75', '1.0', '1.25'),
    lr=('0.002',),
    tokenizer='bytes',
    steps=500,
  )
  common.choice('mlp', arguments['mlp'], MLPS)
  common.choice('tokenizer', arguments['tokenizer'], VOCABULARIES)
  for name in arguments['sizes']:
    common.choice('sizes', name, WIDTHS)
  for key in ('gammas', 'lr'):
    arguments[key] = common.numbers(key, arguments[key])
  return arguments


def get_config(arg=None):
  """Arguments: mlp, seeds, sizes, gammas, lr (each a+b), tokenizer, steps."""
  arguments = _arguments(arg)
  config = base.get_config()
  config.model.mlp = arguments['mlp']
  config.model.V = VOCABULARIES[arguments['tokenizer']]
  config.opt.lr = arguments['lr'][0]
  config.data.tokenizer = arguments['tokenizer']
  config.train.steps = arguments['steps']
  config.train.loss_chunk = 1024
  config.checkpoint.every = 50
  return config


def rung(name):
  """Bundle for `add`: the label and the shape of a size."""
  width = WIDTHS[name]
  return {
    'size': name,
    'model.D': width,
    'model.F': 4 * width,
    'model.N': 4,
    'model.K': 2,
    'model.H': width // 4,
  }


def sweep(add, arg=None):
  """Every gamma (at every learning rate) and size, the small sizes first."""
  arguments = _arguments(arg)
  rates = arguments['lr']
  tuned = [[{'opt.lr': rate}] for rate in rates] if len(rates) > 1 else [[]]
  for name in arguments['sizes']:
    for gamma in arguments['gammas']:
      for rate in tuned:
        for seed in range(arguments['seeds']):
          add(rung(name), {'init.gamma': gamma}, *rate, seed=seed)

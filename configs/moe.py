r"""Mixture of experts: the question of the ladder with 2 of 16 experts a token.

  python -m gamma_jax.main --config=configs/moe.py --workdir=runs/moe
  python -m gamma_jax.main --config=configs/moe.py:sizes=0.1B+0.2B --mode=plan

Without an argument 6 cells on the sample text: three gammas, two seeds, some
minutes on two CPU cores. The large rungs are those of configs/sizes.py with
each MLP replaced by 16 experts of half its width: two of them are one MLP, so
a token costs what it costs in the dense rung, and is trained on as many tokens.
They need data prepared as configs/sweep_1p5b.py says, and GPUs or TPUs. Watch
moe/max_load, moe/dead_experts and moe/load_balance (1 is even).
"""

from configs import base, common, sizes, sweep_1p5b

EXPERTS, TOP_K = 16, 2

TINY = dict(D=64, F=256, L=4, N=4, K=2, H=16, V=4096)  # that of base.py
# SwiGLU experts, elementwise gate, untied vocabulary. Tested.
RUNGS = (
  # 0.8M active, 2.2M in all; 0.3M active non-embedding
  'tiny',
  # 253.4M active, 715.8M in all; 99.3M active non-embedding
  '0.1B',
  # 411.3M active, 1380.2M in all; 205.8M active non-embedding
  '0.2B',
  # 653.9M active, 2511.8M in all; 397.0M active non-embedding
  '0.4B',
  # 1118.3M active, 4933.3M in all; 810.0M active non-embedding
  '0.8B',
  # 1645.1M active, 7458.4M in all; 1234.0M active non-embedding
  '1.5B',
)


def _arguments(arg):
  arguments = common.parse_arg(arg, sizes=('tiny',), seeds=2, mlp='swiglu')
  common.choice('mlp', arguments['mlp'], ('gelu', 'swiglu'))
  for name in arguments['sizes']:
    common.choice('sizes', name, RUNGS)
  return arguments


def get_config(arg=None):
  """Arguments: sizes (tiny, or 0.1B+0.2B+...), seeds (how many), mlp."""
  arguments = _arguments(arg)
  large = arguments['sizes'] != ('tiny',)
  config = sweep_1p5b.get_config() if large else base.get_config()
  config.model.mlp = arguments['mlp']
  config.model.moe.experts = EXPERTS
  if large:
    config.model.moe.dispatch = 'ragged'
  else:
    config.train.steps = 400
  return config


def rung(name):
  """Bundle for `add`: the size's label, its shape and its experts."""
  large = sizes.rung(name) if name in sizes.RUNGS else {}
  shape = {f'model.{letter}': n for letter, n in _shape(name).items()}
  experts = {'experts': EXPERTS, 'top_k': TOP_K, 'F': _width(name)}
  return (
    {'size': f'{name}-moe'}
    | {k: v for k, v in large.items() if k.startswith('train.')}
    | shape
    | {f'model.moe.{key}': value for key, value in experts.items()}
  )


def sweep(add, arg=None):
  """Three gammas at every size, the small sizes first."""
  arguments = _arguments(arg)
  for name in arguments['sizes']:
    for seed in range(arguments['seeds']):
      for gamma in (0.5, 0.75, 1.0):
        add(rung(name), {'init.gamma': gamma}, seed=seed)


def parameters(name):
  """(active non-embedding, active, all) parameters of a rung, SwiGLU."""
  r = _shape(name)
  attention = r['D'] * r['H'] * (3 * r['N'] + 2 * r['K'])  # q, gate, o; k, v
  outside = attention + r['D'] * EXPERTS + 2 * r['D']  # router, two norms
  expert = 3 * r['D'] * _width(name)
  active, total = (
    r['L'] * (outside + n * expert) + r['D'] for n in (TOP_K, EXPERTS)
  )
  vocabulary = 2 * r['V'] * r['D']
  return active, active + vocabulary, total + vocabulary


def describe(name):
  """The comment beside a rung."""
  blocks, active, total = (f'{n / 1e6:.1f}M' for n in parameters(name))
  return f'{active} active, {total} in all; {blocks} active non-embedding'


def _shape(name):
  if name == 'tiny':
    return TINY
  letters = {k: v for k, v in sizes.RUNGS[name].items() if k != 'batch'}
  return letters | {'V': sizes.VOCABULARY}


def _width(name):
  """Hidden units of an expert: TOP_K of them make one MLP."""
  return _shape(name)['F'] // TOP_K

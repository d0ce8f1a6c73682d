"""Writes the files of sweeps that nobody has run."""

import math

import numpy as np

from gamma_jax import configure, files, mechanics, metric_writer
from gamma_jax.config import Config, ModelConfig

GAMMAS = (0.3, 0.5, 0.75, 1.0)
RULES = ('gpt2', 'xavier', 'megatron')
GRID = [{'init.gamma': g} for g in GAMMAS] + [{'init.rule': r} for r in RULES]
# Widths; the loss falls with the number of parameters they make.
SIZES = {'16M': 512, '38M': 768, '67M': 1024}
ROLES = ('embed', 'head', 'qk', 'vo', 'gate', 'mlp')
RUN = {
  'attempts': [
    {
      'exit': 'done',
      'command': ['python', '-m', 'gamma_jax.main', '--config=<a & b>'],
      'versions': {'python': '3.11.7', 'jax': '0.10.2', 'flax': None},
      'devices': {'platform': 'cpu', 'kind': 'cpu', 'count': 1},
      'git': {'sha': '0123456789abcdef', 'dirty': False, 'diff_sha256': 'ab'},
    }
  ]
}


def cell_id(overrides):
  return ','.join(
    f'{key.split(".")[-1]}={value}' for key, value in overrides.items()
  )


def loss(overrides):
  """Final held-out loss with a common part per seed, so that pairs help."""
  gamma = overrides.get('init.gamma', 0.45)
  seed = np.random.default_rng(overrides['seed']).normal() * 0.05
  own = (
    np.random.default_rng([int(gamma * 100), overrides['seed']]).normal()
    * 0.004
  )
  best = 2e-3 if gamma < 0.6 else 4e-3
  rate = 0.05 * math.log(overrides.get('opt.lr', best) / best) ** 2
  shift = 0.02 * len(overrides.get('init.rule', '')) + rate
  # At (gamma - 0.8)^2 more: multipliers of a few tens of per cent.
  level = 4.2
  if 'size' in overrides:
    level = 2.6 + 160 * (12 * SIZES[overrides['size']] ** 2 * 6) ** -0.27
    return level + 0.25 * (gamma - 0.8) ** 2 + shift + 0.2 * seed + own
  return level + (gamma - 0.8) ** 2 + shift + seed + own


def config(overrides):
  """The cell's config."""
  D = SIZES.get(overrides.get('size'), 64)
  base = Config(model=ModelConfig(D=D, F=4 * D, L=6, N=D // 16, K=D // 16))
  for path, value in overrides.items():
    base = configure.replace_by_path(base, path, value)
  return base


def line(overrides, step, final, noise, traces):
  """One line of metrics.jsonl."""
  gamma = overrides.get('init.gamma', 0.45)
  scale = 20 * (1 + gamma)
  value = final + (8.3 - final) * math.exp(-step / scale)
  out = {'train/loss': value + noise.normal() * 0.05}
  out['data/batch_crc32'] = 1000 * overrides['seed'] + step
  out['train/tokens_seen'] = 1024 * step
  if traces:
    out |= measured(gamma, step)
    start = 512**-gamma
    for i, role in enumerate(ROLES):
      out[f'rms/params/{role}'] = start + 0.02 * (i + 1) * (
        1 - math.exp(-step / 200)
      )
  return out


def measured(gamma, step):
  """What mechanics.py writes, where it would."""
  out = {}
  if not mechanics.is_due(step, 3, 400):
    return out
  for layer in range(2):
    for kind in ('q', 'k', 'v', 'o', 'up', 'down'):
      rank = 40 - 30 * gamma * math.exp(-(((step - 60) / 50) ** 2))
      out[f'condense/stable_rank/{kind}/{layer}'] = rank + layer
      out[f'condense/stable_rank_random/{kind}'] = 38.0
    out[f'residual/mlp/{layer}'] = 0.1 * gamma * (layer + 1)
    for head in range(2):
      share = 0.4 * (1.1 - gamma) * (1 - math.exp(-step / 100)) + layer / 10
      out[f'sink/share/{layer}/{head}'] = 0.02 + share
  return out | {'sink/uniform_floor': 0.02}


def write(folder, arms, seeds=3, steps=400, traces=False):
  """Writes the files of a finished sweep; returns its cells."""
  cells = []
  for arm in arms:
    for seed in range(seeds):
      overrides = {**arm, 'seed': seed}
      cell = {'id': cell_id(overrides), 'overrides': overrides}
      cells.append(cell)
      final = loss(overrides)
      where = folder / cell['id']
      noise = np.random.default_rng(seed)
      writer = metric_writer.JsonlWriter(where / 'metrics.jsonl')
      if traces:
        writer.write(0, measured(overrides.get('init.gamma', 0.45), 0))
      for step in range(1, steps + 1):
        writer.write(step, line(overrides, step, final, noise, traces))
      writer.close()
      write_results(where, final, steps)
      files.write_json(
        where / 'config.json', configure.to_dict(config(overrides))
      )
      files.write_json(where / 'run.json', RUN)
      draws = {'embed [4, 4]': seed}
      files.write_json(where / 'init_report.json', {'draws': draws})
      (where / 'init_report.txt').write_text('init report\n')
  files.write_json(folder / 'sweep.json', {'cells': cells})
  return cells


def write_results(where, final, steps=400):
  """results.json of one cell."""
  result = {
    'status': 'done',
    'steps': steps,
    'metrics': {
      'heldout/loss': final,
      'heldout/loss_stderr': 0.01,
      'heldout/tokens': 4096,
      'heldout/bits_per_byte': final / 2.5,
    },
    'timing': {'seconds': 12.3456},
  }
  files.write_json(where / 'results.json', result)


def fail(where, reason):
  """Turns a finished cell into one that stopped for `reason`."""
  (where / 'results.json').unlink()
  run = {'attempts': [dict(RUN['attempts'][0], exit=reason)]}
  files.write_json(where / 'run.json', run)


def ladder(gammas=GAMMAS, sizes=SIZES, **more):
  """Arms at every size."""
  return [
    {'size': size, 'init.gamma': gamma, **more}
    for size in sizes
    for gamma in gammas
  ]

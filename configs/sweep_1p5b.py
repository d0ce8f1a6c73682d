r"""The question at size: 0.1B to 1.5B, four gammas and a fixed std, 3 seeds.

  python -m gamma_jax.main --config=configs/sweep_1p5b.py --mode=plan
  python -m gamma_jax.main --config=configs/sweep_1p5b.py:sizes=0.1B+0.2B \
    --workdir=runs/ladder --config.data.source='jsonl:/corpus/*.jsonl' \
    --config.data.tokenizer=/corpus/tokenizer.json

75 cells, 6e21 FLOPs in all: the 0.1B rung alone is about 6e19. `plan` gives the
memory and needs neither data nor accelerators; 1.5B wants at least 8 devices of
80 GB or 32 of 16 GB. Prepare the text before the first run:

  python -m gamma_jax.data --source='jsonl:/corpus/*.jsonl' \
    --tokenizer=/corpus/tokenizer.json

28.8B tokens serve every rung once over; the vocabulary may have up to 100352
entries. Each cell can be given to another machine with --only=size=0.1B and
the same --workdir. Expect results.csv with one row a cell; loss against size
by arm is what the scaling fit wants.
"""

from configs import base, common, sizes


def _arguments(arg):
  arguments = common.parse_arg(arg, sizes=tuple(sizes.RUNGS), seeds=3)
  for name in arguments['sizes']:
    common.choice('sizes', name, sizes.RUNGS)
  return arguments


def get_config(arg=None):
  """Arguments: sizes (0.1B+0.2B+...), seeds (how many)."""
  _arguments(arg)
  config = base.get_config()
  config.model.mlp = 'swiglu'
  config.model.dtype = 'bfloat16'
  config.model.remat = 'full'
  config.opt.lr = 1e-3
  config.opt.warmup_steps = 500
  config.train.loss_chunk = 8192
  # Nothing lies there: the header says what to prepare and how to name it.
  config.data.source = 'jsonl:/corpus/*.jsonl'
  config.data.tokenizer = '/corpus/tokenizer.json'
  config.data.heldout_percent = 0.1
  config.mesh.data = 1
  config.mesh.fsdp = -1
  config.checkpoint.every = 500
  config.eval.every = 1000
  config.eval.batch_size = 64
  return config


def sweep(add, arg=None):
  """Every arm at every size, the small sizes first."""
  arguments = _arguments(arg)
  for name in arguments['sizes']:
    for seed in range(arguments['seeds']):
      for gamma in (0.5, 0.75, 1.0, 1.25):
        add(sizes.rung(name), {'init.gamma': gamma}, seed=seed)
      fixed = {'init.rule': 'fixed', 'init.std': 0.02}
      add(sizes.rung(name), fixed, seed=seed)

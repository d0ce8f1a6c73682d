"""10 million parameters on Chinese and English text, in about twenty minutes.

  python -m gamma_jax.data offline-bi          # once: fetches and prepares
  python -m gamma_jax.main --config=configs/bilingual_10m.py \
    --workdir=runs/bilingual_10m

One cell at gamma = 1 on the corpus of gamma_jax/data/offline_bi.py with its
tokenizer of 16384: 9.8 M parameters, 3.5 M of them outside of the embedding and
the head, on 4096 tokens an update. Twenty minutes on two CPU cores are far from
enough to train it: expect a held-out loss well below ln V = 9.7, and words and
verses rather than sentences. README.md, "From text to an exported model", goes
on with evaluation and export. Another arm: --config.init.gamma=0.5.
"""

from configs import base, common

CORPUS = '~/.cache/gamma_jax/data/offline-bi'


def get_config(arg=None):
  """Argument: steps (updates)."""
  steps = common.parse_arg(arg, steps=500)['steps']
  config = base.get_config()
  config.model.D = 192
  config.model.F = 512
  config.model.L = 8
  config.model.N = 6
  config.model.K = 3
  config.model.H = 32
  config.model.V = 16384
  config.train.steps = steps
  config.train.batch_size = 16
  config.train.seq_len = 256
  config.train.loss_chunk = 1024
  config.data.source = f'jsonl:{CORPUS}/*.jsonl'
  config.data.tokenizer = f'{CORPUS}/bpe16k.json'
  config.eval.documents = 2000  # of the held-out ones, parts taking turns
  config.checkpoint.every = 50
  return config

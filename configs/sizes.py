"""The size ladder, 0.1B to 1.5B: Llama-like rungs for long sequences.

A name is nominal. Each rung says what it has with SwiGLU, the elementwise gate
and an untied vocabulary of 100352; gate='none' takes D * N * H * L away. Tokens
are 20 for each parameter that multiplies a token (all but the embedding table,
whose rows are looked up); FLOPs are 6 a token and such parameter, without the
attention scores. `--mode=plan` counts those too. The comments are tested.
"""

import math

VOCABULARY = 100352  # 49 * 2^11: divides over any usual number of devices
SEQ_LEN = 4096
TOKENS_PER_PARAMETER = 20

# Two query heads to a kv head; heads of 64 or 128 that fill D; F about 8/3 D.
# batch: rows of SEQ_LEN an update, half a million or a million tokens.
RUNGS = {
  # 99.1M non-embedding, 253.3M in all; 3.5B tokens, 3.7e+18 FLOPs
  '0.1B': dict(D=768, F=2048, L=14, N=12, K=6, H=64, batch=128),
  # 205.6M non-embedding, 411.1M in all; 6.2B tokens, 1.1e+19 FLOPs
  '0.2B': dict(D=1024, F=2816, L=16, N=16, K=8, H=64, batch=128),
  # 396.5M non-embedding, 653.4M in all; 10.5B tokens, 3.3e+19 FLOPs
  '0.4B': dict(D=1280, F=3456, L=20, N=20, K=10, H=64, batch=256),
  # 809.3M non-embedding, 1117.6M in all; 19.3B tokens, 1.1e+20 FLOPs
  '0.8B': dict(D=1536, F=4224, L=28, N=12, K=6, H=128, batch=256),
  # 1233.2M non-embedding, 1644.3M in all; 28.8B tokens, 2.5e+20 FLOPs
  '1.5B': dict(D=2048, F=5632, L=24, N=16, K=8, H=128, batch=256),
}


def rung(name):
  """Bundle for `add`: the size's label, its shape, batch and length."""
  if name not in RUNGS:
    raise ValueError(f'no size {name!r}; there are {", ".join(RUNGS)}')
  shape = dict(RUNGS[name])
  batch = shape.pop('batch')
  return {
    'size': name,
    **{f'model.{letter}': value for letter, value in shape.items()},
    'model.V': VOCABULARY,
    'train.batch_size': batch,
    'train.seq_len': SEQ_LEN,
    'train.steps': math.ceil(tokens(name) / (batch * SEQ_LEN)),
  }


def parameters(name):
  """(non-embedding, all) parameters of a rung."""
  r = RUNGS[name]
  attention = r['D'] * r['H'] * (3 * r['N'] + 2 * r['K'])  # q, gate, o; k, v
  block = attention + 3 * r['D'] * r['F'] + 2 * r['D']  # and two norms
  non_embedding = r['L'] * block + r['D']
  return non_embedding, non_embedding + 2 * VOCABULARY * r['D']


def multiplying(name):
  """Parameters that multiply every token: all but the embedding table."""
  return parameters(name)[1] - VOCABULARY * RUNGS[name]['D']


def tokens(name):
  """Tokens to train a rung on."""
  return TOKENS_PER_PARAMETER * multiplying(name)


def describe(name):
  """The comment beside a rung."""
  non_embedding, total = parameters(name)
  flops = 6 * multiplying(name) * tokens(name)
  return (
    f'{non_embedding / 1e6:.1f}M non-embedding, {total / 1e6:.1f}M in all; '
    f'{tokens(name) / 1e9:.1f}B tokens, {flops:.1e} FLOPs'
  )

"""The decoder in plain float64 NumPy, to hold the JAX code against.

Written from the formulas alone, without a line of gamma_jax. Everything is
dense and slow: one document, one head and one layer at a time.
"""

import numpy as np
from scipy import special


def sigmoid(x):
  return special.expit(x)


def gelu(x):
  return x * 0.5 * (1 + special.erf(x / np.sqrt(2)))


def silu(x):
  return x * sigmoid(x)


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def rms_norm(x, scale, eps):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def rope(x, positions, theta):
  """Turns pair (i, i + H/2) of x [T, H], seen as a complex number."""
  half = x.shape[-1] // 2
  rate = theta ** (-np.arange(half) / half)
  turn = np.exp(1j * positions[:, None] * rate)
  pairs = (x[:, :half] + 1j * x[:, half:]) * turn
  return np.concatenate([pairs.real, pairs.imag], axis=-1)


def attend_head(q, k, v, segment_ids):
  """q, k, v [T, H] -> [T, H]: causal within a document, padding gives 0."""
  out = np.zeros((len(q), v.shape[-1]))
  for t in range(len(q)):
    if segment_ids[t] == 0:
      continue
    seen = np.flatnonzero(segment_ids[: t + 1] == segment_ids[t])
    out[t] = softmax(k[seen] @ q[t] / np.sqrt(q.shape[-1])) @ v[seen]
  return out


def attend(q, k, v, segment_ids):
  """q [B, T, N, H], k and v [B, T, K, H] -> [B, T, N, H]."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  B, _, N, _ = q.shape
  group = N // k.shape[2]
  out = np.zeros(q.shape)
  for b in range(B):
    for n in range(N):
      j = n // group
      out[b, :, n] = attend_head(
        q[b, :, n], k[b, :, j], v[b, :, j], segment_ids[b]
      )
  return out


def rotate(x, positions, theta):
  """rope of every row and head of x [B, T, N, H]."""
  return np.stack(
    [
      np.stack(
        [rope(x[b, :, n], positions[b], theta) for n in range(x.shape[2])],
        axis=1,
      )
      for b in range(len(x))
    ]
  )


def attention(u, p, config, segment_ids, positions):
  q = np.einsum('btd,dnh->btnh', u, p['q']['kernel'])
  k = np.einsum('btd,dnh->btnh', u, p['k']['kernel'])
  v = np.einsum('btd,dnh->btnh', u, p['v']['kernel'])
  if config.qk_norm:
    q = rms_norm(q, p['q_norm']['scale'], config.norm_eps)
    k = rms_norm(k, p['k_norm']['scale'], config.norm_eps)
  q = rotate(q, positions, config.rope_theta)
  k = rotate(k, positions, config.rope_theta)
  y = attend(q, k, v, segment_ids)
  if config.gate == 'elementwise':
    y = y * sigmoid(np.einsum('btd,dnh->btnh', u, p['gate']['kernel']))
  if config.gate == 'headwise':
    y = y * sigmoid(np.einsum('btd,dn->btn', u, p['gate']['kernel']))[..., None]
  return np.einsum('btnh,nhd->btd', y, p['o']['kernel'])


def mlp(u, p, config):
  hidden = u @ p['up']['kernel']
  if config.mlp == 'swiglu':
    hidden = silu(u @ p['gate']['kernel']) * hidden
  else:
    hidden = gelu(hidden)
  return hidden @ p['down']['kernel']


def pick_layer(tree, layer):
  """Layer `layer` of stacked parameters, in float64."""
  if isinstance(tree, dict):
    return {name: pick_layer(branch, layer) for name, branch in tree.items()}
  return np.asarray(tree[layer], np.float64)


def forward(params, config, tokens, segment_ids, positions):
  """Logits [B, T, V] of the whole decoder.

  Args:
    params: nested dict of arrays; leaves under 'blocks' have the layer first.
    config: ModelConfig.
    tokens: [B, T] int; so are segment_ids (0 is padding) and positions.
  """
  table = np.asarray(params['embed']['embedding'], np.float64)
  eps = config.norm_eps
  x = table[tokens]
  for layer in range(config.L):
    p = pick_layer(params['blocks'], layer)
    u = rms_norm(x, p['attn_norm']['scale'], eps)
    x = x + attention(u, p['attn'], config, segment_ids, positions)
    x = x + mlp(rms_norm(x, p['mlp_norm']['scale'], eps), p['mlp'], config)
  x = rms_norm(x, np.asarray(params['final_norm']['scale'], np.float64), eps)
  if config.tied:
    return x @ table.T
  return x @ np.asarray(params['head']['kernel'], np.float64)

"""Parameters, FLOPs and memory of a config, by arithmetic alone.

Letters: see model.py; E experts. Nothing here builds the model; tests hold the
counts against its parameters, its products and its compiled train step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from gamma_jax.config import Config, ModelConfig

# Of the MLP: its matrices, and the hidden-sized arrays kept for its gradient.
MLP_MATRICES = {'swiglu': 3, 'gelu': 2}
MLP_SAVED = {'swiglu': 6, 'gelu': 4}


class ParameterCount(NamedTuple):
  """How many numbers the model holds.

  Attributes:
    total: all; a tied matrix counts once.
    embedding: matrices with a vocabulary axis: the table, an untied head.
    non_embedding: the rest, so tied and untied models agree on it.
    active: total without the experts that a token does not go to.
  """

  total: int
  embedding: int
  non_embedding: int
  active: int


def by_role(model: ModelConfig) -> dict[str, int]:
  """Parameters of every role in the model; norm scales under 'norm'."""
  D, L, V, H = model.D, model.L, model.V, model.H
  heads, kv_heads, E = model.N * H, model.K * H, model.moe.experts
  norms = 2 * D + (2 * H if model.qk_norm else 0)
  mlps = E + model.moe.shared if E else 1
  counts = {
    'embed': V * D,
    'head': 0 if model.tied else D * V,
    'qk': L * D * (heads + kv_heads),
    'vo': L * D * (heads + kv_heads),
    'gate': L * D * _gate_width(model),
    'mlp': L * mlps * _mlp_size(model),
    'router': L * D * E,
    'norm': L * norms + D,
  }
  return {role: n for role, n in counts.items() if n}


def parameters(model: ModelConfig) -> ParameterCount:
  """Counts the parameters of the model."""
  roles = by_role(model)
  total = sum(roles.values())
  embedding = roles['embed'] + roles.get('head', 0)
  idle = max(model.moe.experts - model.moe.top_k, 0)
  active = total - model.L * idle * _mlp_size(model)
  return ParameterCount(total, embedding, total - embedding, active)


def flops_per_token(model: ModelConfig, seq_len: int) -> int:
  """Model FLOPs of one token, forward and backward, averaged over a row.

    6 * (entries of every matrix that multiplies the token)
    + 12 * L * N * H * (T + 1) / 2

  A product costs 2 FLOPs an entry forward and twice that backward. The head
  multiplies, tied or not; the embedding lookup and the norms are left out.
  Token t of a row attends to t keys, (T + 1) / 2 on average; documents in the
  row are not told apart. Recomputation, and the masked half of attention that
  the hardware does all the same, are not counted.
  """
  roles = by_role(model)
  multiplied = parameters(model).active - roles['norm']
  if not model.tied:
    multiplied -= roles['embed']
  return 6 * multiplied + 6 * model.L * model.N * model.H * (seq_len + 1)


def train_bytes(
  config: Config,
  *,
  weight_shards: int = 1,
  batch_shards: int = 1,
  expert_shards: int = 1,
) -> dict[str, int]:
  """Estimated peak bytes of one train step on one device, by what holds them.

  The multiples are those of the compiled step on CPU in float32, which the sum
  meets within some 10 %; other compilers fuse more or less. Tensor parallelism
  is not taken off the activations, so with it the estimate is high.

  Args:
    config: one cell.
    weight_shards: devices that share one copy of the weights.
    batch_shards: devices that share one batch.
    expert_shards: devices that share the experts of a layer; they show each
      other their rows.
  """
  model, train = config.model, config.train
  count = parameters(model)
  share = -(-count.total // weight_shards)
  compute = jnp.dtype(model.dtype).itemsize
  rows = -(-train.batch_size // (train.accumulation * batch_shards))
  tokens = rows * train.seq_len
  # loss_chunk counts tokens over all devices, a position of every row at least.
  chunk = min(max(train.loss_chunk // batch_shards, rows), tokens)
  gradients = 2 if train.accumulation > 1 else 1  # the sum and the next term
  layer = count.non_embedding // model.L
  experts = model.moe.experts * _mlp_size(model)
  layer -= experts - experts // expert_shards
  gathered = layer + model.D * model.V if weight_shards > 1 else 0
  width = _widths(model, expert_shards)
  return {
    'params': share * jnp.dtype(model.param_dtype).itemsize,
    'moments': share * 8,
    'gradients': share * 4 * gradients,
    'gathered': gathered * compute,
    'activations': tokens * model.L * _saved_bytes(model, width),
    'layer': _layer_bytes(model, width, rows, train.seq_len),
    'logits': 3 * 4 * chunk * model.V + 4 * compute * tokens * model.D,
  }


def _gate_width(model: ModelConfig) -> int:
  widths = {'none': 0, 'headwise': model.N, 'elementwise': model.N * model.H}
  return widths[model.gate]


def _mlp_size(model: ModelConfig) -> int:
  """Parameters of the MLP, or of one expert."""
  F = model.moe.F or model.F if model.moe.experts else model.F
  return MLP_MATRICES[model.mlp] * model.D * F


class _Widths(NamedTuple):
  """Numbers that a token leaves for the backward pass of one layer."""

  norm: int  # around norms, float32 when kept over layers
  attention: int
  mlp: int


def _widths(model: ModelConfig, expert_shards: int) -> _Widths:
  heads, kv_heads = model.N * model.H, model.K * model.H
  gate = {'none': 0, 'headwise': 1, 'elementwise': 3}[model.gate]
  norm = 8 * model.D + (3 * (heads + kv_heads) if model.qk_norm else 0)
  attention = (2 + gate) * heads + 2 * kv_heads
  moe, saved = model.moe, MLP_SAVED[model.mlp]
  if not moe.experts:
    return _Widths(norm, attention, saved * model.F)
  F = moe.F or model.F
  copies = moe.experts if moe.dispatch == 'dense' else moe.top_k
  # Ragged rows have room for all that are shown; the others split it by expert.
  room = expert_shards if moe.dispatch == 'ragged' else 1
  routed = copies * room * (saved * F + 2 * model.D)
  routed += 2 * model.D * expert_shards if expert_shards > 1 else 0
  return _Widths(norm, attention, routed + moe.shared * saved * F)


def _saved_bytes(model: ModelConfig, width: _Widths) -> int:
  """Bytes of one token and layer kept from the forward to the backward pass."""
  compute = jnp.dtype(model.dtype).itemsize
  if model.remat == 'full':
    return compute * model.D
  if model.remat == 'none':
    return 4 * width.norm + compute * (width.attention + width.mlp)
  # The stream and the result of each product, experts apart: q, k, v, gate, o,
  # up, down.
  F = model.F
  if model.moe.experts:
    F = (model.moe.F or F) * model.moe.shared
  up = (MLP_MATRICES[model.mlp] - 1) * F
  heads = (model.N + 2 * model.K) * model.H + _gate_width(model)
  return compute * (3 * model.D + heads + up)


def _layer_bytes(
  model: ModelConfig, width: _Widths, rows: int, seq_len: int
) -> int:
  """Bytes of the layer whose backward pass is under way.

  The branches are undone one after the other: the numbers of the MLP are gone
  when the float32 logits of a query block (and two more arrays like them) come.
  """
  compute = jnp.dtype(model.dtype).itemsize
  block = min(model.attention_block, seq_len)
  logits = {
    'blocks': 3 * 4 * rows * model.N * block * seq_len,
    'splash': 0,
    'cudnn': compute * rows * seq_len * seq_len,  # no logits, but a mask
  }[model.attention]
  both = compute * (width.norm + width.attention) * rows * seq_len
  return both + max(compute * width.mlp * rows * seq_len, logits)

"""What a config should look like at step 0, from its stds alone.

Mean squares are propagated through the blocks as for independent Gaussian
entries, forward (stream and branches) and backward (first gradients). It
needs no parameters, so it works for models that do not fit. Exponents follow
arXiv 2606.17945: branch over stream goes as d^(1-gamma) for attention and
GELU, d^(3/2-2 gamma) for SwiGLU. Assumed: tokens of a document independent,
attention near uniform (logits normal), gradients of tokens uncorrelated; real
text repeats tokens, so measured attention branches are somewhat larger.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from gamma_jax import init_rules
from gamma_jax.config import Config

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(64)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


@dataclasses.dataclass(frozen=True)
class Layer:
  """Mean squares around one block, per entry.

  Attributes:
    attn_stream: input of the attention norm.
    attn_branch: what attention adds.
    mlp_stream: input of the MLP norm.
    mlp_branch: what the MLP adds.
  """

  attn_stream: float
  attn_branch: float
  mlp_stream: float
  mlp_branch: float


@dataclasses.dataclass(frozen=True)
class Prediction:
  """Step-0 quantities of one config.

  Attributes:
    layers: one entry a block.
    final_stream: mean square at the final norm.
    logits_std: standard deviation of the logits.
    loss: expected cross-entropy in nats.
    grad_rms: kind -> RMS of the first mean gradient, by layer ([L] or [1]).
  """

  layers: tuple[Layer, ...]
  final_stream: float
  logits_std: float
  loss: float
  grad_rms: dict[str, np.ndarray]


def mean_square_of(fn: Callable, variance: float) -> float:
  """E[fn(z)^2] for z ~ N(0, variance), by Gauss-Hermite quadrature."""
  return float(_WEIGHTS @ fn(_NODES * math.sqrt(variance)) ** 2)


def gelu(z):
  """Exact GELU."""
  return 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))


def _gelu_slope(z):
  cdf = 0.5 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))
  return cdf + z * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


def sigmoid(z):
  """1 / (1 + exp(-z))."""
  return 0.5 * (1 + np.tanh(z / 2))


def silu(z):
  """z sigmoid(z)."""
  return z * sigmoid(z)


def _silu_slope(z):
  return sigmoid(z) * (1 + z * (1 - sigmoid(z)))


def shared_mass(T: int, logit_variance: float) -> float:
  """E[sum_s p_ts^2] averaged over queries t of a T-token document.

  Uniform attention over t keys gives 1/t, hence H_T / T; normal logits raise
  it by exp(variance), up to 1.
  """
  t = np.arange(1, T + 1)
  return float(np.mean(np.minimum(1.0, math.exp(logit_variance) / t)))


class _Stds:
  """Squared stds of the matrices under a config's rule."""

  def __init__(self, config: Config):
    m = config.model
    rule = init_rules.make_rule(config.init, m)
    fans = {
      'embed': (m.D, m.V),
      'head': (m.D, m.V),
      'q': (m.D, m.N * m.H),
      'k': (m.D, m.K * m.H),
      'v': (m.D, m.K * m.H),
      'gate': (m.D, m.N if m.gate == 'headwise' else m.N * m.H),
      'o': (m.N * m.H, m.D),
      'router': (m.D, m.moe.experts),
    }
    for up, gate, down, F in (
      ('up', 'mlp_gate', 'down', dense_width(m)),
      ('expert_up', 'expert_gate', 'expert_down', m.moe.F or m.F),
    ):
      fans |= {up: (m.D, F), gate: (m.D, F), down: (F, m.D)}
    for kind, fan in fans.items():
      if 0 in fan:  # the model has no such matrix
        continue
      setattr(self, kind, float(rule.matrix_std(kind, *fan)) ** 2)
    if m.tied:
      self.head = self.embed


def predict(config: Config) -> Prediction:
  """Propagates mean squares forward and backward through the model."""
  m, s = config.model, _Stds(config)
  forward = []
  stream = s.embed
  for _ in range(m.L):
    attn = _attention(config, s, stream)
    mlp = _mlp(config, s, stream + attn['branch'])
    forward.append((stream, attn, stream + attn['branch'], mlp))
    stream += attn['branch'] + mlp['branch']
  kept = stream / (stream + m.norm_eps)
  logit_variance = m.D * s.head * kept
  return Prediction(
    layers=tuple(
      Layer(x, a['branch'], y, b['branch']) for x, a, y, b in forward
    ),
    final_stream=stream,
    logits_std=math.sqrt(logit_variance),
    loss=math.log(m.V) + logit_variance / 2,
    grad_rms=_gradients(config, s, forward, stream),
  )


def _attention(config: Config, s: _Stds, stream: float) -> dict[str, float]:
  m = config.model
  u = stream / (stream + m.norm_eps)
  q, k, v = (m.D * x * u for x in (s.q, s.k, s.v))
  if m.qk_norm:
    q, k = q / (q + m.norm_eps), k / (k + m.norm_eps)
  mass = shared_mass(config.train.seq_len, q * k)
  gate_in = m.D * s.gate * u
  gate = 1.0 if m.gate == 'none' else mean_square_of(sigmoid, gate_in)
  out = mass * v
  branch = m.N * m.H * s.o * gate * out
  return dict(
    u=u, q=q, k=k, v=v, mass=mass, gate=gate, gate_in=gate_in, out=out,
    branch=branch,
  )  # fmt: skip


def _mlp(config: Config, s: _Stds, stream: float) -> dict:
  """Branch, and what the gradients need of each of its parts."""
  m = config.model
  u = stream / (stream + m.norm_eps)
  parts, router = [], None
  if dense_width(m):
    kinds = ('up', 'mlp_gate', 'down')
    parts.append(_part(m, s, u, kinds, dense_width(m)))
  if m.moe.experts:
    router = _routing(m, m.D * s.router * u)
    kinds = ('expert_up', 'expert_gate', 'expert_down')
    share = router['square']
    parts.append(_part(m, s, u, kinds, m.moe.F or m.F, share, m.moe.experts))
  branch = sum(part['branch'] for part in parts)
  return dict(u=u, parts=parts, router=router, branch=branch)


def _part(m, s: _Stds, u, kinds, F: int, share=1.0, copies=1) -> dict:
  """One MLP, or E experts that a token weighs by w: `share` is sum(w^2)."""
  up_kind, gate_kind, down = kinds
  up = m.D * getattr(s, up_kind) * u
  if m.mlp == 'gelu':
    hidden = mean_square_of(gelu, up)
    back = {up_kind: mean_square_of(_gelu_slope, up)}
  else:
    gate = m.D * getattr(s, gate_kind) * u
    hidden = up * mean_square_of(silu, gate)
    back = {
      up_kind: mean_square_of(silu, gate),
      gate_kind: up * mean_square_of(_silu_slope, gate),
    }
  return dict(
    hidden=hidden, back=back, down=down, F=F, share=share, copies=copies,
    branch=share * F * getattr(s, down) * hidden,
  )  # fmt: skip


def _routing(m, variance: float) -> dict[str, float]:
  """What normal router logits of this variance make of the weights.

  By 4000 draws. square: sum of the squared weights of a token. slope: mean
  over experts of the squared derivative of its output to a logit, for expert
  outputs of unit variance; z: the same of logsumexp^2.
  """
  rng = np.random.default_rng(0)
  logits = math.sqrt(variance) * rng.normal(size=(4000, m.moe.experts))
  every = np.exp(logits)
  total = every.sum(-1, keepdims=True)
  rank = np.argsort(np.argsort(-logits, axis=-1), axis=-1)
  w = np.where(rank < m.moe.top_k, every, 0.0)
  # As in route.py: the weight of a single choice is its probability.
  w /= total if m.moe.top_k == 1 else w.sum(-1, keepdims=True)
  square = (w**2).sum(-1, keepdims=True)
  if m.moe.top_k == 1:
    p = every / total
    slope = square * np.where(rank == 0, (1 - p) ** 2, p**2)
  else:
    slope = w**2 * (1 - 2 * w + square)
  z = (2 * np.log(total) * every / total) ** 2
  return {
    'square': float(square.mean()), 'slope': float(slope.mean()),
    'z': float(z.mean()),
  }  # fmt: skip


def dense_width(m) -> int:
  """Hidden units that every token sees: the MLP, or the shared experts."""
  return m.moe.shared * (m.moe.F or m.F) if m.moe.experts else m.F


def _gradients(config: Config, s: _Stds, forward, final: float):
  """RMS of the first mean gradient of every kind, by layer."""
  m, t = config.model, config.train
  n = t.batch_size * t.seq_len  # tokens in the mean
  kept = final / (final + m.norm_eps)
  ms: dict[str, list[float]] = {'head': [kept / (n * m.V)]}
  # Per-token gradient of the stream, already divided by n: the logit gradient
  # (p - onehot) has norm 1, and the norm divides by the stream's RMS.
  g = s.head / n**2 / (final + m.norm_eps)
  for stream, attn, mid, mlp in reversed(forward):
    g += _mlp_gradients(config, s, mlp, g, ms) / (mid + m.norm_eps)
    out_g = m.D * s.o * g  # at the gated head outputs
    ms.setdefault('o', []).append(n * attn['gate'] * attn['out'] * g)
    u, v_g = attn['u'], out_g * attn['gate'] * attn['mass'] * m.N / m.K
    # A key or value sums over the queries that see it: about T of weight 1/T.
    ms.setdefault('v', []).append(n * u * v_g)
    score_g = m.H * out_g * attn['gate'] * attn['v'] * attn['mass'] / m.H
    ms.setdefault('q', []).append(n * u * score_g * attn['k'])
    k_g = score_g * attn['q'] * m.N / m.K
    ms.setdefault('k', []).append(n * u * k_g)
    back = m.K * m.H * s.v * v_g
    if m.gate != 'none':
      width = m.H if m.gate == 'headwise' else 1
      gate_g = width * out_g * attn['out'] / 16  # sigmoid' is 1/4 at 0
      ms.setdefault('gate', []).append(n * u * gate_g)
    g += back / (stream + m.norm_eps)
  # A row of the embedding collects the tokens that show it, n / V of them.
  embed = n * g / m.V + (ms['head'][0] if m.tied else 0.0)
  ms['embed'] = [embed]
  if m.tied:
    del ms['head']
  return {k: np.sqrt(np.array(v[::-1])) for k, v in ms.items()}


def _mlp_gradients(config: Config, s: _Stds, mlp, g: float, ms) -> float:
  """Adds to `ms`; returns what flows back to the normed input.

  Of the router's losses only that of z counts: a load that is even enough has
  hardly any gradient.
  """
  m, n = config.model, config.train.batch_size * config.train.seq_len
  back = 0.0
  for part in mlp['parts']:
    per_copy = n * part['share'] / part['copies']
    ms.setdefault(part['down'], []).append(per_copy * part['hidden'] * g)
    hidden_g = m.D * getattr(s, part['down']) * g
    for kind, slope in part['back'].items():
      ms.setdefault(kind, []).append(per_copy * mlp['u'] * hidden_g * slope)
      std = getattr(s, kind)
      back += part['share'] * part['F'] * std * hidden_g * slope
  if router := mlp['router']:
    one = mlp['parts'][-1]['branch'] / router['square']  # of one expert
    z = (m.moe.router_z / n) ** 2 * router['z']
    logit_g = m.D * g * one * router['slope'] + z
    ms.setdefault('router', []).append(n * mlp['u'] * logit_g)
    back += m.moe.experts * s.router * logit_g
  return back

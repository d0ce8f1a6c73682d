"""Decoder with an output gate, for plain `transformers` and torch.

Copied beside the weights by gamma_jax.export when no class of transformers
has the shape of the model; loaded with trust_remote_code=True. No part of the
gamma_jax package, and independent of it. Keeps no key-value cache: generation
reads the whole text for every token.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class GammaConfig(PretrainedConfig):
  """Shape of the decoder; the names are those of LlamaConfig.

  `gate` is none, headwise or elementwise; `mlp` is swiglu or gelu.
  """

  model_type = 'gamma_jax'

  def __init__(
    self,
    vocab_size=257,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    max_position_embeddings=128,
    rms_norm_eps=1e-12,
    rope_theta=10000.0,
    gate='none',
    mlp='swiglu',
    qk_norm=False,
    **kwargs,
  ):
    self.vocab_size = vocab_size
    self.hidden_size = hidden_size
    self.intermediate_size = intermediate_size
    self.num_hidden_layers = num_hidden_layers
    self.num_attention_heads = num_attention_heads
    self.num_key_value_heads = num_key_value_heads
    self.head_dim = head_dim
    self.max_position_embeddings = max_position_embeddings
    self.rms_norm_eps = rms_norm_eps
    self.rope_theta = rope_theta
    self.gate = gate
    self.mlp = mlp
    self.qk_norm = qk_norm
    super().__init__(**kwargs)


class RMSNorm(nn.Module):
  """Statistics, epsilon and scale in float32."""

  def __init__(self, width, eps):
    super().__init__()
    self.weight = nn.Parameter(torch.ones(width))
    self.eps = eps

  def forward(self, x):
    x32 = x.float()
    mean_square = x32.square().mean(-1, keepdim=True)
    normed = x32 * torch.rsqrt(mean_square + self.eps)
    return (normed * self.weight.float()).to(x.dtype)


def rope(x, positions, theta):
  """Rotates pairs (i, i + H/2) of [B, heads, T, H] by position."""
  H = x.shape[-1]
  index = torch.arange(0, H, 2, dtype=torch.float32, device=x.device)
  angle = positions[:, None, :, None].float() * theta ** (-index / H)
  cos, sin = angle.cos(), angle.sin()
  a, b = x.float().chunk(2, dim=-1)
  return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
  """Grouped-query attention; the gate acts before the output matrix."""

  def __init__(self, config):
    super().__init__()
    self.config = c = config
    D, N, K, H = (
      c.hidden_size,
      c.num_attention_heads,
      c.num_key_value_heads,
      c.head_dim,
    )
    self.q_proj = nn.Linear(D, N * H, bias=False)
    self.k_proj = nn.Linear(D, K * H, bias=False)
    self.v_proj = nn.Linear(D, K * H, bias=False)
    self.o_proj = nn.Linear(N * H, D, bias=False)
    if c.qk_norm:
      self.q_norm = RMSNorm(H, c.rms_norm_eps)
      self.k_norm = RMSNorm(H, c.rms_norm_eps)
    if c.gate != 'none':
      width = N * H if c.gate == 'elementwise' else N
      self.g_proj = nn.Linear(D, width, bias=False)

  def forward(self, x, positions, mask):
    c = self.config
    B, T, _ = x.shape
    q, k, v = (
      project(x).view(B, T, -1, c.head_dim)
      for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    if c.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    q, k = (rope(y, positions, c.rope_theta) for y in (q, k))
    groups = c.num_attention_heads // c.num_key_value_heads
    k, v = (y.repeat_interleave(groups, dim=1) for y in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    y = y.transpose(1, 2)  # [B, T, N, H]
    if c.gate != 'none':
      gate = self.g_proj(x).float().sigmoid().to(y.dtype)
      y = y * gate.view(B, T, c.num_attention_heads, -1)
    return self.o_proj(y.reshape(B, T, -1))


class Mlp(nn.Module):
  """SwiGLU with three matrices or exact GELU with two."""

  def __init__(self, config):
    super().__init__()
    D, hidden = config.hidden_size, config.intermediate_size
    self.up_proj = nn.Linear(D, hidden, bias=False)
    self.down_proj = nn.Linear(hidden, D, bias=False)
    self.gate_proj = None
    if config.mlp == 'swiglu':
      self.gate_proj = nn.Linear(D, hidden, bias=False)

  def forward(self, x):
    if self.gate_proj is None:
      return self.down_proj(F.gelu(self.up_proj(x)))
    return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
  """Pre-norm block."""

  def __init__(self, config):
    super().__init__()
    norm = (config.hidden_size, config.rms_norm_eps)
    self.input_layernorm = RMSNorm(*norm)
    self.self_attn = Attention(config)
    self.post_attention_layernorm = RMSNorm(*norm)
    self.mlp = Mlp(config)

  def forward(self, x, positions, mask):
    x = x + self.self_attn(self.input_layernorm(x), positions, mask)
    return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
  """Tokens to hidden states after the final norm."""

  def __init__(self, config):
    super().__init__()
    self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    self.layers = nn.ModuleList(
      Block(config) for _ in range(config.num_hidden_layers)
    )
    self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

  def forward(self, tokens, attention_mask):
    T = tokens.shape[1]
    real = torch.ones_like(tokens) if attention_mask is None else attention_mask
    real = real.bool()
    positions = (real.long().cumsum(-1) - 1).clamp(min=0)
    causal = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
    mask = (causal & real[:, None, :]) | torch.eye(
      T, dtype=torch.bool, device=tokens.device
    )  # padding sees itself, so that no row is empty
    x = self.embed_tokens(tokens)
    for layer in self.layers:
      x = layer(x, positions, mask[:, None])
    return self.norm(x)


class GammaForCausalLM(PreTrainedModel, GenerationMixin):
  """Decoder and output matrix."""

  config_class = GammaConfig
  base_model_prefix = 'model'
  _no_split_modules = ['Block']
  _tied_weights_keys = {'lm_head.weight': 'model.embed_tokens.weight'}

  def __init__(self, config):
    super().__init__(config)
    self.model = Decoder(config)
    self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    self.post_init()

  def get_input_embeddings(self):
    return self.model.embed_tokens

  def set_input_embeddings(self, value):
    self.model.embed_tokens = value

  def get_output_embeddings(self):
    return self.lm_head

  def set_output_embeddings(self, value):
    self.lm_head = value

  def prepare_inputs_for_generation(
    self, input_ids, attention_mask=None, **kwargs
  ):
    return {'input_ids': input_ids, 'attention_mask': attention_mask}

  def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
    """[B, T] ids -> logits float32 [B, T, V]; a label of -100 is none."""
    logits = self.lm_head(self.model(input_ids, attention_mask)).float()
    loss = None
    if labels is not None:
      loss = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
      )
    return CausalLMOutput(loss=loss, logits=logits)

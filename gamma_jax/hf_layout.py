"""Our parameters under the names and shapes of Hugging Face models, and back.

Nothing is computed: every tensor is a reshaped, transposed copy with the same
bits. RoPE pairs (i, i + H/2) on both sides, query head n reads kv head n // G
on both sides, and qk-norm is one RMSNorm over H per head, as in Qwen3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gamma_jax.config import Config, ModelConfig
from gamma_jax.errors import ConfigError

FILE = 'modeling_gamma.py'  # in gamma_jax/hf_template
OURS = 'GammaForCausalLM'  # class in it
_HEADS = {'q': 'N', 'k': 'K', 'v': 'K'}


class _Place(NamedTuple):
  """Where one of our parameters goes.

  Attributes:
    path: ours, without `/kernel` and the like cut off.
    name: theirs; has `{}` for the layer where ours is stacked.
    shape: ours, without the layer axis.
    inputs: leading axes of `shape` that are contracted; theirs is
      [out, in]. 0 leaves the tensor as it is.
  """

  path: str
  name: str
  shape: tuple[int, ...]
  inputs: int


def architecture(model: ModelConfig) -> str:
  """Class that reads the export: Llama's, Qwen3's, or the file we ship.

  Raises:
    ConfigError: no class reads such a model.
  """
  if model.moe.experts:
    raise ConfigError(
      f'model.moe.experts={model.moe.experts} cannot be exported: there is no '
      'class for our experts; set model.moe.experts=0'
    )
  # The configs of transformers refuse a width that the heads do not divide.
  plain = model.gate == 'none' and model.mlp == 'swiglu'
  if not plain or model.D % model.N:
    return OURS
  return 'Qwen3ForCausalLM' if model.qk_norm else 'LlamaForCausalLM'


def config_json(config: Config, eot_id: int) -> dict[str, Any]:
  """Content of config.json.

  Args:
    config: the cell.
    eot_id: id that opens and closes every document.
  """
  model, name = config.model, architecture(config.model)
  out = {
    'architectures': [name],
    'model_type': {
      'LlamaForCausalLM': 'llama',
      'Qwen3ForCausalLM': 'qwen3',
      OURS: 'gamma_jax',
    }[name],
    'vocab_size': model.V,
    'hidden_size': model.D,
    'intermediate_size': model.F,
    'num_hidden_layers': model.L,
    'num_attention_heads': model.N,
    'num_key_value_heads': model.K,
    'head_dim': model.H,
    'hidden_act': 'silu' if model.mlp == 'swiglu' else 'gelu',
    'max_position_embeddings': config.train.seq_len,
    'rms_norm_eps': model.norm_eps,
    'rope_theta': model.rope_theta,
    'attention_bias': False,
    'tie_word_embeddings': model.tied,
    'bos_token_id': eot_id,
    'eos_token_id': eot_id,
    'torch_dtype': model.param_dtype,  # weights keep their bits
  }
  if name == OURS:
    module = FILE.removesuffix('.py')
    out |= {
      'auto_map': {
        'AutoConfig': f'{module}.GammaConfig',
        'AutoModelForCausalLM': f'{module}.{OURS}',
      },
      'gate': model.gate,
      'mlp': model.mlp,
      'qk_norm': model.qk_norm,
      'use_cache': False,
    }
  return out


def to_tensors(params: dict, model: ModelConfig) -> dict[str, np.ndarray]:
  """Parameter tree -> tensors by their Hugging Face name."""
  out = {}
  for place in _places(model):
    value = np.asarray(_at(params, place.path))
    if '{}' not in place.name:
      out[place.name] = _turn(value, place)
      continue
    for layer, one in enumerate(value):
      out[place.name.format(layer)] = _turn(one, place)
  return out


def from_tensors(tensors: dict[str, np.ndarray], model: ModelConfig) -> dict:
  """Inverse of `to_tensors`, bit for bit.

  Raises:
    ConfigError: a tensor is missing, left over, or of another shape.
  """
  left, params = dict(tensors), {}
  for place in _places(model):
    many = '{}' in place.name
    names = [place.name.format(i) for i in range(model.L if many else 1)]
    values = [_turn_back(left, name, place) for name in names]
    *parents, leaf = place.path.split('/')
    node = params
    for parent in parents:
      node = node.setdefault(parent, {})
    node[leaf] = np.stack(values) if many else values[0]
  if left:
    raise ConfigError(f'tensor {min(left)} belongs to no parameter')
  return params


def _places(model: ModelConfig) -> list[_Place]:
  D, N, H, F, V = model.D, model.N, model.H, model.F, model.V
  layer, attn = 'model.layers.{}', 'model.layers.{}.self_attn'
  places = [
    _Place('embed/embedding', 'model.embed_tokens.weight', (V, D), 0),
    _Place('final_norm/scale', 'model.norm.weight', (D,), 0),
    _Place(
      'blocks/attn_norm/scale', f'{layer}.input_layernorm.weight', (D,), 0
    ),
    _Place(
      'blocks/mlp_norm/scale',
      f'{layer}.post_attention_layernorm.weight',
      (D,),
      0,
    ),
    _Place('blocks/attn/o/kernel', f'{attn}.o_proj.weight', (N, H, D), 2),
    _Place('blocks/mlp/up/kernel', f'{layer}.mlp.up_proj.weight', (D, F), 1),
    _Place(
      'blocks/mlp/down/kernel', f'{layer}.mlp.down_proj.weight', (F, D), 1
    ),
  ]
  for x, heads in _HEADS.items():
    shape = (D, getattr(model, heads), H)
    places.append(
      _Place(f'blocks/attn/{x}/kernel', f'{attn}.{x}_proj.weight', shape, 1)
    )
  if model.qk_norm:
    places += [
      _Place(f'blocks/attn/{x}/scale', f'{attn}.{x}.weight', (H,), 0)
      for x in ('q_norm', 'k_norm')
    ]
  if model.gate != 'none':
    shape = (D, N, H) if model.gate == 'elementwise' else (D, N)
    places.append(
      _Place('blocks/attn/gate/kernel', f'{attn}.g_proj.weight', shape, 1)
    )
  if model.mlp == 'swiglu':
    name = f'{layer}.mlp.gate_proj.weight'
    places.append(_Place('blocks/mlp/gate/kernel', name, (D, F), 1))
  if not model.tied:
    places.append(_Place('head/kernel', 'lm_head.weight', (D, V), 1))
  return places


def _at(params: dict, path: str):
  node = params
  for key in path.split('/'):
    node = node[key]
  return node


def _turn(value: np.ndarray, place: _Place) -> np.ndarray:
  if value.shape != place.shape:
    raise ValueError(f'{place.path}: {value.shape}, not {place.shape}')
  if not place.inputs:
    return np.ascontiguousarray(value)
  rows = int(np.prod(place.shape[: place.inputs]))
  return np.ascontiguousarray(value.reshape(rows, -1).T)


def _turn_back(
  tensors: dict[str, np.ndarray], name: str, place: _Place
) -> np.ndarray:
  """Takes `name` out of `tensors` -> our layout of it."""
  if name not in tensors:
    raise ConfigError(f'tensor {name} is missing')
  value = tensors.pop(name)
  rows = int(np.prod(place.shape[: place.inputs]))
  want = (int(np.prod(place.shape)) // rows, rows)
  want = want if place.inputs else place.shape
  if value.shape != want:
    raise ConfigError(f'tensor {name} has shape {value.shape}, not {want}')
  return (value.T if place.inputs else value).reshape(place.shape)

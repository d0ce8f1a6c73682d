"""Real transformers and torch read what we write. Run by `make test-export`."""

import dataclasses
import json
import random

import jax.numpy as jnp
import numpy as np
import pytest

from gamma_jax import export, hf_layout, train_step, trained
from gamma_jax.config import Config, DataConfig, ModelConfig, TrainConfig
from gamma_jax.data import tokenizer as tokenizer_lib
from tests.hf_layout_test import drawn

pytestmark = pytest.mark.export
T = 24
PLAIN = ModelConfig(D=24, F=40, L=2, N=4, K=2, H=8, V=257, gate='none')
VARIANTS = {
  'llama': {},
  'llama_tied': {'tied': True, 'K': 1, 'rope_theta': 500.0},
  'qwen3': {'qk_norm': True},
  'elementwise': {'gate': 'elementwise'},
  'headwise_gelu': {'gate': 'headwise', 'mlp': 'gelu', 'K': 4},
  'gelu_tied_qk': {'mlp': 'gelu', 'qk_norm': True, 'tied': True},
  'odd_width': {'D': 26, 'norm_eps': 1e-5},
}


def exported(change, out):
  """A model of random weights -> (Trained, folder)."""
  config = Config(
    model=dataclasses.replace(PLAIN, **change),
    train=TrainConfig(seq_len=T),
    data=DataConfig(tokenizer='bytes'),
  )
  params = drawn(config.model)
  # Mean square 1e-6: an epsilon of 1e-5 for 1e-12 would show.
  params['embed']['embedding'] *= 0.2 if config.model.tied else 1e-3
  for kernel in ('q', 'k', 'v', 'o'):
    params['blocks']['attn'][kernel]['kernel'] *= 0.3
  if not config.model.tied:
    params['head']['kernel'] *= 0.2
  made = trained.Trained(out, config, 7, params, {})
  export.write(made, out)
  return made, out


def our_logits(made, tokens):
  tokens = jnp.asarray(tokens, jnp.int32)
  positions = jnp.broadcast_to(
    jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape
  )
  hidden, head = train_step.transformer(made.config).apply(
    {'params': made.params}, tokens, jnp.ones_like(tokens), positions
  )
  return np.asarray(jnp.einsum('BTD,DV->BTV', hidden, head))


def read(folder, **kwargs):
  transformers = pytest.importorskip('transformers')
  pytest.importorskip('torch')
  return transformers.AutoModelForCausalLM.from_pretrained(
    folder, trust_remote_code=(folder / hf_layout.FILE).exists(), **kwargs
  )


@pytest.mark.parametrize('name', VARIANTS)
def test_logits_are_ours(name, tmp_path):
  made, folder = exported(VARIANTS[name], tmp_path)
  theirs, info = read(folder, output_loading_info=True)
  assert not any(info.values())  # nothing missing, nothing left over
  assert type(theirs).__name__ == hf_layout.architecture(made.config.model)
  assert theirs.config.rms_norm_eps == made.config.model.norm_eps
  import torch

  tokens = np.random.default_rng(0).integers(0, 257, (2, T))
  with torch.no_grad():
    got = theirs(torch.tensor(tokens)).logits.numpy()
  want = our_logits(made, tokens)
  assert np.abs(want).max() > 0.5
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_a_wrong_epsilon_would_show(tmp_path):
  made, folder = exported({}, tmp_path)
  content = json.loads((folder / 'config.json').read_text())
  content['rms_norm_eps'] = 1e-5
  (folder / 'config.json').write_text(json.dumps(content))
  theirs = read(folder)
  import torch

  tokens = np.arange(T)[None]
  with torch.no_grad():
    got = theirs(torch.tensor(tokens)).logits.numpy()
  assert np.abs(got - our_logits(made, tokens)).max() > 1e-2


def test_the_shipped_class_generates_with_padding(tmp_path):
  _, folder = exported(VARIANTS['elementwise'], tmp_path)
  theirs = read(folder)
  import torch

  text = torch.tensor([[256, 72, 101, 108]])
  padded = torch.cat([torch.zeros(1, 3, dtype=text.dtype), text], dim=1)
  mask = (torch.arange(7) >= 3).long()[None]
  options = dict(max_new_tokens=6, do_sample=False, pad_token_id=256)
  alone = theirs.generate(text, **options)[0, 4:]
  shifted = theirs.generate(padded, attention_mask=mask, **options)[0, 7:]
  assert alone.tolist() == shifted.tolist()
  loss = theirs(text, labels=text).loss
  loss.backward()
  assert theirs.model.layers[1].self_attn.g_proj.weight.grad.abs().sum() > 0


def test_an_export_gives_the_parameters_back(tmp_path):
  pytest.importorskip('safetensors')
  made, folder = exported(
    {'param_dtype': 'bfloat16', 'qk_norm': True}, tmp_path
  )
  back = export.read_params(folder)
  for path in ('attn/k_norm/scale', 'attn/o/kernel', 'mlp/down/kernel'):
    a, b = made.params['blocks'], back['blocks']
    for key in path.split('/'):
      a, b = a[key], b[key]
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


def texts():
  rng = random.Random(0)
  alphabet = ['a', 'e', ' ', '  ', '\n', '\r\n', '=', '-', "'", "'LL", 'the ']
  alphabet += ['7', '\u00e9', '\u4e2d', '\U0001f600', '\t', 'A', '\u0301', '.']
  for _ in range(400):
    yield ''.join(rng.choices(alphabet, k=rng.randrange(1, 40)))
  for char in ' =-\n.a0\u4e2d':
    yield from (char * n for n in range(1, 70))


@pytest.mark.parametrize('name', ['bytes', 'bpe4k'])
def test_the_tokenizer_is_ours(name, tmp_path):
  transformers = pytest.importorskip('transformers')
  ours = tokenizer_lib.load_tokenizer(name)
  model = dataclasses.replace(PLAIN, V=ours.vocab_size)
  config = Config(model=model, data=DataConfig(tokenizer=name))
  made = trained.Trained(tmp_path, config, 1, drawn(model), {})
  export.write(made, tmp_path)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  assert len(theirs) == ours.vocab_size
  for text in texts():
    want = ours.encode(text).tolist()
    assert theirs(text)['input_ids'] == [ours.eot_id, *want], repr(text)
    assert theirs.decode(want) == text


def test_a_folder_in_use_is_refused(tmp_path, capsys):
  pytest.importorskip('safetensors')
  assert export.main([str(tmp_path), '--out', str(tmp_path / 'x')]) == 2
  assert 'no config.json' in capsys.readouterr().err
  with pytest.raises(ValueError, match='not an empty folder'):
    exported({}, exported({}, tmp_path / 'y')[1])

"""Writes a trained cell as a Hugging Face folder.

  python -m gamma_jax.export CELL --out=DIR

CELL is `<workdir>/<cell id>`. DIR gets model.safetensors, config.json, the
tokenizer and gamma_jax.json (config of the run, step). Plain `transformers`
reads it with AutoModelForCausalLM.from_pretrained(DIR): as Llama, or as Qwen3
with model.qk_norm. With a gate, a GELU MLP or a width that the heads do not
divide, DIR also gets modeling_gamma.py and needs trust_remote_code=True.
Experts are refused.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import sys
from collections.abc import Sequence

from gamma_jax import (
  configure,
  errors,
  files,
  hf_layout,
  hf_tokenizer,
  trained,
)
from gamma_jax.data import tokenizer as tokenizer_lib

WEIGHTS = 'model.safetensors'
TEMPLATE = pathlib.Path(__file__).parent / 'hf_template' / hf_layout.FILE


def write(model: trained.Trained, out: pathlib.Path) -> str:
  """Writes a trained cell to the folder `out`.

  Returns:
    Name of the class of transformers, or of the shipped file, that reads it.

  Raises:
    ConfigError: a model that no class reads, a tokenizer of another project, a
      folder that is in use, or safetensors is not installed.
  """
  save_file = _numpy_safetensors().save_file
  config = model.config
  name = hf_layout.architecture(config.model)
  files.check_empty(out)
  tokenizer = tokenizer_lib.load_tokenizer(config.data.tokenizer)
  if not isinstance(tokenizer, tokenizer_lib.Tokenizer):
    raise errors.ConfigError(
      f'data.tokenizer={config.data.tokenizer}: only tokenizers of this project'
      ' are exported; the file is one already'
    )
  tensors = hf_layout.to_tensors(model.params, config.model)
  for file, content in {
    'config.json': hf_layout.config_json(config, tokenizer.eot_id),
    'tokenizer.json': hf_tokenizer.tokenizer_json(
      tokenizer.pattern, tokenizer.ranks
    ),
    'tokenizer_config.json': hf_tokenizer.tokenizer_config_json(
      config.train.seq_len
    ),
    'gamma_jax.json': {
      'step': model.step,
      'config_hash': configure.config_hash(config),
      'config': configure.to_dict(config),
    },
  }.items():
    # Plain JSON: files.write_json reads the words NaN and Infinity, which may
    # be tokens, as numbers.
    files.write_text(out / file, json.dumps(content, indent=2) + '\n')
  if name == hf_layout.OURS:
    shutil.copyfile(TEMPLATE, out / hf_layout.FILE)
  save_file(tensors, out / WEIGHTS, metadata={'format': 'pt'})
  shutil.copymode(out / 'config.json', out / WEIGHTS)  # it would be private
  return name


def read_params(folder: pathlib.Path) -> dict:
  """Parameter tree of an export, with the bits of the checkpoint.

  Raises:
    ConfigError: the weights do not fit the config in gamma_jax.json.
  """
  saved = json.loads((folder / 'gamma_jax.json').read_text(encoding='utf-8'))
  config = configure.from_dict(saved['config'])
  tensors = _numpy_safetensors().load_file(folder / WEIGHTS)
  return hf_layout.from_tensors(tensors, config.model)


def _numpy_safetensors():
  try:
    import safetensors.numpy  # an optional extra
  except ImportError as error:
    raise errors.ConfigError(
      "the export needs safetensors: pip install 'gamma_jax[export]'"
    ) from error
  return safetensors.numpy


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  parser = argparse.ArgumentParser(
    prog='python -m gamma_jax.export',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('cell', type=pathlib.Path, help='<workdir>/<cell id>')
  parser.add_argument('--out', type=pathlib.Path, required=True)
  args = parser.parse_args(argv)
  try:
    name = write(trained.load(args.cell), args.out)
  except errors.ConfigError as error:
    print(f'error: {error}', file=sys.stderr)
    return error.exit_code
  print(f'{args.out}: {name}')
  return 0


if __name__ == '__main__':
  sys.exit(main())

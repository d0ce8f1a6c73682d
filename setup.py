"""Package metadata. Lower bounds are the versions that are tested together."""

import setuptools

REPORT = ['matplotlib>=3.11']
TB = ['tensorboardX>=2.6.5']
# rustbpe trains tokenizers; the others read files that other projects wrote.
TOKENIZER = ['rustbpe>=0.1.0', 'sentencepiece>=0.2.3', 'tokenizers>=0.22']
PARQUET = ['pyarrow>=26.0']
HUB = ['datasets>=5.0']  # the newest that transformers below 5 lets in
# Compilers of chips that are not here, for --mode=plan with plan.target; JAX
# names their versions. Large: 0.7 and 0.4 GB when installed.
PLAN_TPU = ['jax[tpu]>=0.10.2']
PLAN_GPU = ['jax[cuda12-local]>=0.10.2']  # without the CUDA libraries
# Models that we did not write, for the worked examples of audit and reinit.
# recurrentgemma pins older numpy and absl, so it is tested in its own venv.
EXAMPLES = ['mamba2-jax>=1.1.2', 'transformers>=4.57.6,<5']
# For other programs: the exporter itself, then the evaluation harness, which
# needs no torch, then what reads the export in our tests.
EXPORT = ['safetensors>=0.8']
LM_EVAL = ['lm-eval>=0.4.13']
READERS = ['torch>=2.13', 'transformers>=5.24']
SLURM = ['submitit>=1.5.2']
NOTEBOOKS = ['ipykernel>=7.4', 'nbclient>=0.11']
MATH = ['math-verify>=0.9.0']  # answers of math500
GYM = ['reasoning-gym>=0.1.25']  # tasks gym:NAME
DEV = [
  'hypothesis>=6.170',
  'pytest>=9.2',
  'pytest-xdist>=3.8',
  'ruff>=0.17.6',
]

setuptools.setup(
  name='gamma_jax',
  version='0.1.0',
  description='How the scale of initial weights shapes language models.',
  license='Apache-2.0',
  python_requires='>=3.11',
  packages=setuptools.find_packages(
    include=['gamma_jax', 'gamma_jax.*', 'configs']
  ),
  package_data={'gamma_jax': ['data/sample/*', 'hf_template/*.py']},
  install_requires=[
    'absl-py>=1.4',
    'array_record>=0.8.6',
    'flax>=0.12.8',
    'grain>=0.2.18',
    'importlib_resources>=7.1',  # tensorflow-datasets imports it, undeclared
    'jax>=0.10.2',
    'ml_collections>=1.1',
    'numpy>=2.3',
    'optax>=0.2.8',
    'orbax-checkpoint>=0.12.8',
    'rich>=15.0',
    'scipy>=1.17',
    'tensorflow-datasets>=4.9.10',
    'tiktoken>=0.14',
  ],
  extras_require={
    'report': REPORT,
    'tb': TB,
    'tokenizer': TOKENIZER,
    'parquet': PARQUET,
    'hub': HUB,
    'plan-tpu': PLAN_TPU,
    'plan-gpu': PLAN_GPU,
    'plan': [*PLAN_TPU, *PLAN_GPU],
    'examples': [*EXAMPLES, 'recurrentgemma>=1.0.1'],
    'export': EXPORT,
    'lm-eval': LM_EVAL,
    'readers': [*EXPORT, *LM_EVAL, *READERS],
    'slurm': SLURM,
    'notebooks': [*NOTEBOOKS, *REPORT],
    'math': MATH,
    'gym': GYM,
    'dev': [
      *DEV,
      *REPORT,
      *TB,
      *TOKENIZER,
      *PARQUET,
      *HUB,
      *EXPORT,
      *EXAMPLES,
      *SLURM,
    ],
  },
)

"""Numbers of a fixed run. A change here voids recorded runs: say so.

Meant to move only on purpose: update GOLDEN from the failure message, in the
commit that changes the numbers, and add a **Voids:** line to CHANGELOG.md.
The tolerance is for other machines; on one machine runs repeat bit for bit.
"""

import jax
import numpy as np
import pytest

from gamma_jax import configure, train_step
from gamma_jax import program as program_lib
from gamma_jax.config import Config, ModelConfig, OptConfig, TrainConfig

CONFIG = Config(
  model=ModelConfig(D=32, F=64, L=2, N=4, K=2, H=8, V=64, mlp='swiglu'),
  opt=OptConfig(lr=1e-2, warmup_steps=2),
  train=TrainConfig(steps=20, batch_size=4, seq_len=16),
)
GOLDEN = {
  'opt/grad_norm': 0.9927649,
  'opt/lr': 0.01,
  'opt/param_norm': 13.67105,
  'opt/update_norm': 1.294445,
  'rms/params/embed': 0.03224197,
  'rms/params/gate': 0.03364286,
  'rms/params/head': 0.03365118,
  'rms/params/mlp': 0.03049906,
  'rms/params/norm': 1.004435,
  'rms/params/qk': 0.03505468,
  'rms/params/vo': 0.03377181,
  'train/accuracy': 0.3,
  'train/log_z_squared': 17.41373,
  'train/loss': 3.888707,
  'train/tokens': 60,
}


def test_two_updates_of_the_default_model_give_the_recorded_numbers():
  program = program_lib.build(
    configure.program_key(CONFIG), (jax.devices()[0],)
  )
  rng = np.random.default_rng(0)
  batch = {
    'tokens': rng.integers(0, 64, (4, 17)).astype(np.int32),
    'segment_ids': np.tile(np.repeat([1, 2], [7, 10]), (4, 1)).astype(np.int32),
    'positions': np.tile(
      np.concatenate([np.arange(7), np.arange(10)]), (4, 1)
    ).astype(np.int32),
  }
  state, h = program.init(CONFIG), train_step.hyper(CONFIG)
  for _ in range(2):
    state, out = program.step(state, h, program.put_batch(batch))
  got = {k: float(v) for k, v in jax.device_get(out).items()}
  assert got == pytest.approx(GOLDEN, rel=2e-4), f'GOLDEN = {got}'

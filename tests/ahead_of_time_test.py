"""The real train step against the compilers of chips that are not here.

Each plan is a process of its own, as a user starts it: libtpu reads its
environment once, and must not meet the virtual devices of the other tests.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

from gamma_jax import chips, files

pytestmark = pytest.mark.plan
SLOW = pytest.mark.slow  # a compile of half a minute and more, in test-plan-all
OTHERS = ('v6e:8x8', 'v5p:4x4x4')
GIB = 2**30
# One cell of the ladder, whose grid does not let the batch be set by a flag.
CONFIG = """
from configs import common, moe, sizes, sweep_1p5b

def get_config(arg=None):
  arguments = common.parse_arg(arg, batch=0, size='1.5B', attention='blocks')
  size = arguments['size']
  if size == '1.5B':
    config = sweep_1p5b.get_config()
    config.update_from_flattened_dict(sizes.rung(size))
  else:
    config = moe.get_config(f'sizes={size}')
    config.update_from_flattened_dict(moe.rung(size))
    config.mesh.expert = 8
  config.model.attention = arguments['attention']
  config.train.batch_size = arguments['batch']
  return config
"""
TPU = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None,
  reason="no TPU compiler: pip install 'gamma_jax[plan-tpu]'",
)
GPU = pytest.mark.skipif(
  importlib.util.find_spec('jax_cuda12_plugin') is None,
  reason="no GPU compiler: pip install 'gamma_jax[plan-gpu]'",
)


def run(*arguments):
  """A plan in a process without what conftest.py sets."""
  environment = {k: v for k, v in os.environ.items() if 'JAX_' not in k}
  environment.pop('XLA_FLAGS', None)
  return subprocess.run(
    [sys.executable, '-m', 'gamma_jax.main', '--mode=plan', *arguments],
    env=environment,
    capture_output=True,
    text=True,
  )


def planned(
  tmp_path, target, rows, chip_count, code=0, more='', params=1_644_267_520
):
  """Row of the one shape in plan.json, and stderr."""
  path = tmp_path / 'cell.py'
  path.write_text(CONFIG)
  done = run(
    f'--config={path}:batch={rows * chip_count}{more}',
    f'--config.plan.target={target}',
    f'--workdir={tmp_path}',
  )
  assert done.returncode == code, done.stderr[-2000:]
  text = (tmp_path / 'plan.json').read_text()
  (shape,) = files.from_json(text)['shapes']
  assert shape['rows'] == rows
  assert shape['even_state_bytes'] * chip_count == pytest.approx(
    12 * params, rel=1e-4
  )
  # Every weight and moment is spread over all chips.
  assert shape['state_bytes'] < 1.01 * shape['even_state_bytes']
  return shape, done.stderr


@TPU
@pytest.mark.parametrize(
  'target', ['v5e:8x8', *(pytest.param(t, marks=SLOW) for t in OTHERS)]
)
def test_tpu_step_fits(tmp_path, target):
  shape, _ = planned(tmp_path, target, 4, 64)
  assert 1 < shape['peak_bytes'] / GIB < 4.5
  assert shape['peak_bytes'] < 0.9 * chips.parse(target).chip.memory * GIB


@TPU
@SLOW
def test_tpu_step_fits_with_the_kernel_of_tpus(tmp_path):
  shape, _ = planned(tmp_path, 'v5e:8x8', 4, 64, more=',attention=splash')
  assert 1 < shape['peak_bytes'] / GIB < 4.5


@TPU
def test_tpu_step_of_experts_fits(tmp_path):
  # 1.4B in all, 8 devices share 16 experts; ragged products of the TPU.
  shape, _ = planned(
    tmp_path, 'v5e:8x8', 4, 64, more=',size=0.2B', params=1_380_221_952
  )
  assert 1 < shape['peak_bytes'] / GIB < 5.5
  path = tmp_path / 'plan.json'
  (cell,) = files.from_json(path.read_text())['cells']
  # What a run is refused by must not be far below what it takes.
  assert 0.9 < cell['bytes_per_device'] / shape['peak_bytes'] < 2


@TPU
def test_tpu_compiler_refuses_what_is_too_large(tmp_path):
  # Without this, a compiler that checks nothing would pass.
  shape, stderr = planned(tmp_path, 'v5e:8x8', 24, 64, code=2)
  assert shape['peak_bytes'] is None and not shape['fits']
  assert 'Ran out of memory' in shape['refusal']
  assert 'exceeds available HBM (15.75G)' in shape['refusal']
  assert 'error: 1.5B does not fit v5e:8x8' in stderr


@GPU
@pytest.mark.parametrize(
  ('target', 'chip_count', 'most'),
  [('h100:8', 8, 8.0), pytest.param('h100:64', 64, 5.5, marks=SLOW)],
)
def test_gpu_step_fits(tmp_path, target, chip_count, most):
  shape, _ = planned(tmp_path, target, 4, chip_count)
  assert 1 < shape['peak_bytes'] / GIB < most


@TPU
def test_no_such_topology_is_one_line():
  done = run('--config=configs/base.py', '--config.plan.target=v5e:3x5')
  assert done.returncode == 2
  (line,) = [x for x in done.stderr.splitlines() if x.startswith('error: ')]
  assert 'plan.target=v5e:3x5' in line

"""The check passes on the model as it is and fails on a rule that is off."""

import csv

import numpy as np
import pytest

from experiments import coordinate_check
from gamma_jax import init_rules

BF16 = ['--dtype=bfloat16', '--param_dtype=bfloat16']


def failed(slopes):
  return {s.quantity for s in slopes if s.ok is False}


def check(*argv):
  args = coordinate_check.parse(['--workdir=unused', '--quick', *argv])
  rows = coordinate_check.run_all(args)
  return coordinate_check.fit(rows, args.tolerance)


def test_the_real_model_passes_and_everything_is_written(tmp_path, capsys):
  argv = [f'--workdir={tmp_path}', '--quick', '--mlps', 'swiglu']
  assert coordinate_check.main(argv) == 0
  assert '12 of 12 slopes within 0.1' in capsys.readouterr().out
  names = ('coordinate_check.png', 'run.json', 'slopes.md', 'slopes.csv')
  assert all((tmp_path / name).stat().st_size for name in names)
  with open(tmp_path / 'measurements.csv', newline='') as file:
    assert len(list(csv.DictReader(file))) == 3 * 4 * 3


@pytest.mark.slow
def test_bfloat16_computation_and_parameters_pass_too():
  assert not failed(check('--mlps', 'gelu', *BF16))


def test_a_std_off_by_a_power_of_the_width_fails(monkeypatch):
  right = init_rules.InitRule.matrix_std

  def wrong(self, kind, fan_in, fan_out):
    factor = (self.D / 128) ** 0.25 if kind == 'o' else 1.0
    return right(self, kind, fan_in, fan_out) * factor

  monkeypatch.setattr(init_rules.InitRule, 'matrix_std', wrong)
  # No other test may gate by head: compiled programs are kept by config, and
  # a gate, near 1/2 at any width, moves no slope.
  slopes = check('--mlps', 'gelu', '--gammas', '1.0', '--gate', 'headwise')
  assert failed(slopes) == {'attention_flow'}  # and GELU passes in float32
  flow = next(s for s in slopes if s.quantity == 'attention_flow')
  assert flow.slope == pytest.approx(0.25, abs=0.1)


def made_up(slope, noise=0.0):
  rng = np.random.default_rng(0)
  return [
    {'mlp': 'gelu', 'gamma': 1.0, 'width': width, 'step': step}
    | dict.fromkeys(coordinate_check.QUANTITIES, 1.0)
    | {'logits_std': 3 * width**slope * np.exp(noise * rng.normal())}
    for width in (64, 128, 256, 512)
    for _ in range(50)
    for step in (0, 1)
  ]


def logits(slopes):
  return next(s for s in slopes if s.quantity == 'logits_std')


@pytest.mark.parametrize('slope, ok', [(-0.5, True), (-0.4, False)])
def test_fit_finds_the_slope_and_judges_it(slope, ok):
  seen = logits(coordinate_check.fit(made_up(slope), 0.05))
  assert seen.slope == pytest.approx(slope)
  assert np.exp(seen.intercept) == pytest.approx(3)
  assert (seen.expected, seen.ok) == (-0.5, ok)


def test_fit_states_a_95_percent_interval():
  # Standard error of a slope: noise / sqrt(n var(x)); t of 198 is 1.97.
  seen = logits(coordinate_check.fit(made_up(-0.5, noise=0.1), 0.05))
  x = np.log([64, 128, 256, 512])
  assert seen.margin == pytest.approx(
    1.97 * 0.1 / np.sqrt(200 * np.var(x)), rel=0.15
  )


@pytest.mark.slow
def test_after_an_update_the_ratio_is_lr_over_std():
  args = coordinate_check.parse(['--workdir=unused', '--quick', '--lr=1e-4'])
  config = coordinate_check.cell(args, 64, 'gelu', 1.0, 0)
  batch = coordinate_check.token_batch()
  start, after = coordinate_check.run_cell(config, batch, 1)
  assert (start['step'], after['step']) == (0, 1)
  assert 'update_vo' not in start
  # The first Adam update is lr times the sign of the gradient.
  assert after['update_vo'] == pytest.approx(1e-4 * 64, rel=0.05)


def test_tables_say_which_slope_failed():
  slopes = coordinate_check.fit(made_up(-0.4), 0.05)
  lines = coordinate_check.markdown_table(slopes).splitlines()
  row = '| logits_std | gelu | 1 | -0.50 | -0.400 ± 0.000 | FAIL |'
  assert row in lines
  said = coordinate_check.verdict(slopes, 0.05)
  assert said.endswith('logits_std, gelu, gamma 1: -0.400 against -0.50')


@pytest.mark.parametrize('widths', [('64', '100', '128'), ('64', '128')])
def test_widths_must_be_three_multiples_of_the_head_size(widths, capsys):
  with pytest.raises(SystemExit):
    coordinate_check.parse(['--workdir=unused', '--widths', *widths])
  assert 'three or more multiples of 64' in capsys.readouterr().err

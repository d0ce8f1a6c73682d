"""Verdicts of the claim scripts: what counts for, against and not at all."""

import sys

import pytest

from experiments import (
  c1_loss,
  c2_obstacles,
  c3_optimum,
  c4_condense,
  c6_anchor,
  c7_effective_size,
  claim,
)
from gamma_jax import errors, files, report
from gamma_jax.analysis.paired import paired_difference
from tests import fake_sweep

GRID = [
  {'size': size, 'init.gamma': gamma}
  for size in ('16M', '38M', '67M')
  for gamma in (0.5, 0.75, 1.0)
]

SHIFT = {0.5: 0.0, 0.75: -0.2, 1.0: -0.1}  # nats, beyond the noise of seeds


def differences(*triples):
  return [paired_difference([0.0] * len(t), t) for t in triples]


@pytest.mark.parametrize(
  ('values', 'sign', 'want'),
  [
    ([(-1.0, -1.1, -0.9)], -1, claim.SUPPORTED),
    ([(-1.0, -1.1, -0.9)], 1, claim.CONTRADICTED),
    ([(-1.0, 1.0, 0.1)], -1, claim.UNDECIDED),
    ([(-1.0, -1.1, -0.9), (-1.0, 1.0, 0.1)], -1, claim.UNDECIDED),
    ([(-1.0, -1.1, -0.9), (1.0, 1.1, 0.9)], -1, claim.CONTRADICTED),
    ([(-1.0, -1.1)], -1, claim.UNDECIDED),  # two seeds are not enough
    ([], -1, claim.UNDECIDED),
  ],
)
def test_verdict(values, sign, want):
  assert claim.verdict(differences(*values), sign) == want


@pytest.fixture(scope='module')
def sweep(tmp_path_factory):
  folder = tmp_path_factory.mktemp('sweep')
  cells = fake_sweep.write(folder, GRID, steps=60, traces=True)
  for cell in cells:
    o = cell['overrides']
    final = fake_sweep.loss(o) + SHIFT[o['init.gamma']]
    fake_sweep.write_results(folder / cell['id'], final)
  report.write_report(folder)
  return folder


@pytest.mark.parametrize(
  ('script', 'want'),
  [
    (c1_loss, claim.SUPPORTED),
    (c3_optimum, claim.CONTRADICTED),
    (c4_condense, 'a deeper dip: supported here'),
    (c7_effective_size, claim.SUPPORTED),
  ],
)
def test_scripts_write_a_record(script, want, sweep, tmp_path, monkeypatch):
  argv = ['script', str(sweep), f'--out={tmp_path / "record"}']
  monkeypatch.setattr(sys, 'argv', argv)
  script.main()
  text = (tmp_path / 'record/README.md').read_text()
  assert f'**Verdict: {want}' in text
  assert script.CLAIM.refuted_by in text
  assert (tmp_path / 'record/results.csv').read_bytes() == (
    sweep / 'results.csv'
  ).read_bytes()
  for line in text.splitlines():
    if line.startswith('!['):
      name = line.rpartition('(')[2].rstrip(')')
      assert (tmp_path / 'record' / name).exists()


def test_an_unfinished_sweep_gives_no_verdict(tmp_path):
  cells = fake_sweep.write(tmp_path, GRID[:3], seeds=1, steps=1)
  (tmp_path / cells[1]['id'] / 'results.json').unlink()
  with pytest.raises(errors.ConfigError, match='1 of 3 cells are not done'):
    claim.rows(tmp_path)


def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys):
  argv = ['script', str(tmp_path / 'nowhere'), f'--out={tmp_path / "out"}']
  monkeypatch.setattr(sys, 'argv', argv)
  for script in (c1_loss, c3_optimum, c4_condense, c6_anchor):
    assert claim.call(script.main) == errors.ConfigError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('error: ') and 'sweep.json' in line


def test_the_dip_is_found_where_it_was_put(sweep):
  found = c4_condense.dips(sweep)
  step, dip, end = found['16M', 1.0][0]
  # Fake ranks are lowest at step 60; 46 is the last that is measured.
  assert step == 46 and dip == end
  assert dip < found['16M', 0.5][0][1] < 1


def test_gains_are_paired_by_seed():
  rows = [
    {
      'overrides': {'size': 's', 'model.gate': 'none', 'seed': s, **g},
      'metrics': {'heldout/loss': loss},
    }
    for s, g, loss in [
      (1, {'init.gamma': 0.5}, 3.0),
      (0, {'init.gamma': 0.5}, 2.0),
      (0, {'init.gamma': 1.0}, 1.5),
      (1, {'init.gamma': 1.0}, 1.0),
    ]
  ]
  got = c2_obstacles.gains(rows, {'size': 's', 'model.gate': 'none'})
  assert got == {0: 0.5, 1: 2.0}


def test_a_cell_without_mechanics_is_named(tmp_path):
  files.write_text(tmp_path / 'metrics.jsonl', '{"step": 1, "train/loss": 1}\n')
  with pytest.raises(ValueError, match='has no mechanics'):
    c4_condense.trajectory(tmp_path)


RATES = (1e-3, 2e-3, 4e-3, 8e-3)


@pytest.fixture(scope='module')
def tuned(tmp_path_factory):
  folder = tmp_path_factory.mktemp('sweep') / 'tuned'
  grid = [
    {'size': '16M', 'init.gamma': gamma, 'opt.lr': rate}
    for gamma in (0.5, 1.0)
    for rate in RATES
  ]
  fake_sweep.write(folder, grid, steps=2)
  report.write_report(folder)
  return folder


def test_each_arm_of_c1_is_taken_at_its_own_rate(tuned):
  (line,), (difference,), warnings = c1_loss.compared(tuned)
  assert warnings == []  # both bests lie inside of the grid
  rates = [line.split('|')[2].strip() for line in c1_loss.at_each_rate(tuned)]
  assert rates == [f'size=16M, lr={rate}' for rate in RATES]
  assert line.startswith('| tuned | size=16M | 0.002, 0.004 |')
  losses = [
    [
      fake_sweep.loss(
        {'size': '16M', 'init.gamma': gamma, 'opt.lr': rate, 'seed': seed}
      )
      for seed in range(3)
    ]
    for gamma, rate in ((0.5, 2e-3), (1.0, 4e-3))
  ]
  assert difference == paired_difference(*losses)


def test_a_record_of_two_sweeps_keeps_them_apart(
  sweep, tuned, tmp_path, monkeypatch
):
  argv = ['script', str(sweep), str(tuned), f'--out={tmp_path}']
  monkeypatch.setattr(sys, 'argv', argv)
  c1_loss.main()
  text = (tmp_path / 'README.md').read_text()
  for folder in (sweep, tuned):
    name = f'{folder.name}-results.csv'
    got = (tmp_path / name).read_bytes()
    assert got == (folder / 'results.csv').read_bytes()
    assert f'[{name}]({name})' in text
    assert f'- {folder.name}: `python -m gamma_jax.main' in text
    assert f'![{c1_loss.CLAIM.title}]({folder.name}-loss.png)' in text
    assert (tmp_path / f'{folder.name}-loss.png').exists()


def test_two_sweeps_of_one_name_are_refused(tmp_path, monkeypatch):
  argv = ['script', str(tmp_path / 'a/x'), str(tmp_path / 'b/x'), '--out=o']
  monkeypatch.setattr(sys, 'argv', argv)
  with pytest.raises(errors.ConfigError, match='the same name'):
    claim.parse_sweeps(c1_loss.CLAIM, None)


SHARES = {0.5: (1.0, 0.3), 0.65: (1.0, 0.7), 1.0: (0.94, 0.1)}


def test_an_arm_that_did_not_learn_the_pairs_is_no_evidence(tmp_path):
  arms = [{'init.gamma': gamma} for gamma in SHARES]
  cells = fake_sweep.write(tmp_path, arms, steps=1)
  for cell in cells:
    path = tmp_path / cell['id'] / 'results.json'
    result = files.read_json(path)
    gamma, seed = cell['overrides'].values()
    accuracy, composed = SHARES[gamma]
    # gamma = 1.0 passes 0.95 for two of its three seeds.
    result['metrics'] |= {
      'heldout/accuracy': accuracy + 0.03 * (gamma == 1.0 and seed > 0),
      'heldout/mirror/compositional': composed + 0.01 * seed,
    }
    files.write_json(path, result)
  lines, counted = c6_anchor.compared(tmp_path)
  assert [line.rpartition('| ')[2] for line in lines] == ['yes |', 'no |']
  (difference,) = counted
  assert difference.mean == pytest.approx(0.4)
  assert claim.verdict(counted, 1) == claim.SUPPORTED

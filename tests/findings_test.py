"""Arms tuned, compared and sized, from the files of a sweep."""

import math

import numpy as np
import pytest

from gamma_jax import files, findings, flops, report_tables, results
from tests import fake_sweep
from tests.fake_sweep import GRID


def find(folder):
  return findings.find(results.collect(folder))


def losses(folder, arm, seeds=3):
  return np.array(
    [
      files.read_json(
        folder / fake_sweep.cell_id({**arm, 'seed': seed}) / 'results.json'
      )['metrics']['heldout/loss']
      for seed in range(seeds)
    ]
  )


def test_differences_are_paired_by_seed(tmp_path):
  fake_sweep.write(tmp_path, GRID[:2], steps=1)
  gap = losses(tmp_path, GRID[1]) - losses(tmp_path, GRID[0])
  found = find(tmp_path)
  (item,) = found.compared
  assert (item.arm, item.setting) == (GRID[1], {})
  assert item.difference.mean == pytest.approx(gap.mean())
  half = item.difference.t_interval[1] - item.difference.mean
  # t(0.975, 2 degrees of freedom), from a printed table.
  assert half == pytest.approx(4.302653 * gap.std(ddof=1) / math.sqrt(3))
  assert half < found.arms[1].loss.half / 2  # pairs help here
  # Without seed 0 of the first arm two pairs are left, and the table says so.
  (tmp_path / 'gamma=0.3,seed=0' / 'results.json').unlink()
  found = find(tmp_path)
  assert found.compared[0].difference.mean == pytest.approx(gap[1:].mean())
  assert '(2 pairs)' in report_tables.arms(found).body[1][2]


def test_seeds_needed_follow_the_spread(tmp_path):
  fake_sweep.write(tmp_path, GRID[:2], steps=1)
  found = find(tmp_path)
  assert found.compared[0].seeds_needed == 3
  where = tmp_path / 'gamma=0.5,seed=0'
  fake_sweep.write_results(where, losses(tmp_path, GRID[1])[0] + 0.1)
  assert find(tmp_path).compared[0].seeds_needed > 50


def test_arms_are_compared_inside_their_setting(tmp_path):
  arms = [
    {'size': s, 'model.gate': gate, 'init.gamma': g}
    for s in ('16M', '38M')
    for gate in ('none', 'headwise')
    for g in (0.5, 1.0)
  ]
  fake_sweep.write(tmp_path, arms, steps=1)
  found = find(tmp_path)
  assert found.baseline == {'init.gamma': 0.5}
  assert [c.setting for c in found.compared] == [
    {'size': s, 'model.gate': gate}
    for s in ('16M', '38M')
    for gate in ('none', 'headwise')
  ]
  small = arms[1], arms[0]
  gap = losses(tmp_path, small[0]) - losses(tmp_path, small[1])
  assert found.compared[0].difference.mean == pytest.approx(gap.mean())


def test_each_arm_is_taken_at_its_best_learning_rate(tmp_path):
  arms = [
    {'init.gamma': g, 'opt.lr': lr}
    for g in (0.5, 0.75, 1.0)
    for lr in (1e-3, 2e-3, 4e-3)
  ]
  fake_sweep.write(tmp_path, arms, steps=1)
  found = find(tmp_path)
  # The fake losses are lowest at 2e-3 below gamma = 0.6, at 4e-3 above.
  assert [e.tuned['opt.lr'] for e in found.entries] == [2e-3, 4e-3, 4e-3]
  gap = losses(tmp_path, arms[5]) - losses(tmp_path, arms[1])
  assert found.compared[0].difference.mean == pytest.approx(gap.mean())
  said = ' '.join(found.warnings)
  assert 'for gamma=0.75 at opt.lr=0.004, the largest of 3 values' in said
  assert 'gamma=0.5' not in said
  marked = [row[0] for row in report_tables.arms(found).body if row[2]]
  assert marked == ['gamma=0.75, lr=0.004 (best)', 'gamma=1.0, lr=0.004 (best)']


def test_alone_the_learning_rate_is_no_nuisance(tmp_path):
  fake_sweep.write(tmp_path, [{'opt.lr': lr} for lr in (1e-3, 2e-3)], steps=1)
  found = find(tmp_path)
  assert not found.keys.tuned
  assert found.compared[0].arm == {'opt.lr': 2e-3}


def test_best_gamma_at_the_edge_is_said(tmp_path):
  fake_sweep.write(tmp_path / 'a', [*GRID[:3], GRID[-1]], seeds=1, steps=1)
  said = find(tmp_path / 'a').warnings
  assert any('init.gamma=0.75, the largest of 3' in line for line in said)
  fake_sweep.write(tmp_path / 'b', GRID, seeds=1, steps=1)
  assert not find(tmp_path / 'b').warnings


def test_other_random_numbers_are_said(tmp_path):
  fake_sweep.write(tmp_path, GRID[:3], steps=3)
  assert 'no pair of cells differs.' in report_tables.draws(find(tmp_path))
  one = tmp_path / 'gamma=0.5,seed=1'
  (one / 'init_report.json').unlink()
  text = report_tables.draws(find(tmp_path))
  assert 'Unchecked: 2, as initial draws of gamma=0.3,seed=1' in text
  files.write_json(one / 'init_report.json', {'draws': {'embed [4, 4]': 7}})
  found = find(tmp_path)
  assert '2 pairs of cells DIFFER' in report_tables.draws(found)
  assert 'gamma=0.3,seed=1 and gamma=0.5,seed=1: initial' in found.warnings[0]
  path = tmp_path / 'gamma=0.75,seed=0' / 'metrics.jsonl'
  path.write_text(path.read_text().replace('crc32": 3', 'crc32": 33'))
  said = find(tmp_path).warnings
  assert any('batches differ at 1 of' in line for line in said)


def test_effective_size_reads_off_the_baseline(tmp_path):
  fake_sweep.write(tmp_path, fake_sweep.ladder((0.5, 0.75)), steps=1)
  (sized,) = find(tmp_path).sized
  config = fake_sweep.config({'size': '38M'})
  count = flops.parameters(config.model).non_embedding
  assert sized.parameters['38M'] == count
  mean = losses(tmp_path, {'size': '38M', 'init.gamma': 0.75}).mean()
  middle = sized.found.multipliers[1]
  assert sized.found.fit.loss(middle.equal_size) == pytest.approx(mean)
  assert middle.multiplier == pytest.approx(middle.equal_size / count)
  assert 1.0 < middle.multiplier < 1.2
  row = report_tables.sized(find(tmp_path)).body[1]
  assert row[:3] == ['gamma=0.75', '38M', f'{count:,}']


def test_effective_size_is_refused_in_words(tmp_path):
  arms = fake_sweep.ladder((0.5, 0.75))
  fake_sweep.write(tmp_path, arms, steps=1)

  def said():
    return ' '.join(
      ' '.join(r) for r in report_tables.sized(find(tmp_path)).body
    )

  for seed in range(3):  # far below the floor of the baseline
    where = tmp_path / f'size=67M,gamma=0.75,seed={seed}'
    fake_sweep.write_results(where, 1.5 + 0.001 * seed)
  assert 'at or below the fitted floor' in said()
  for seed in range(3):
    where = tmp_path / f'size=67M,gamma=0.75,seed={seed}'
    fake_sweep.fail(where, 'NonFiniteLoss')
  assert '2 sizes have pairs of finished cells' in said()
  for path in tmp_path.glob('*/config.json'):
    path.unlink()
  assert 'no cell of size=16M' in said()


def test_two_sizes_make_no_effective_size(tmp_path):
  arms = fake_sweep.ladder((0.5, 0.75), ('16M', '38M'))
  fake_sweep.write(tmp_path, arms, steps=1)
  found = find(tmp_path)
  assert not found.sized
  assert 'needs 3 sizes' in report_tables.size_notes(found)[0]

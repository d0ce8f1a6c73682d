"""A sweep folder -> results.csv, paired table, plot."""

import csv
import io
import math

import numpy as np
import pytest
import rich.console

from gamma_jax import errors, files, metric_writer, report, results

GAMMAS = (0.3, 0.5, 0.75, 1.0)
RULES = ('gpt2', 'xavier', 'megatron')


def _cell_id(overrides):
  return ','.join(
    f'{key.split(".")[-1]}={value}' for key, value in overrides.items()
  )


def fake_loss(overrides):
  """Final held-out loss with a common part per seed, so that pairs help."""
  gamma = overrides.get('init.gamma', 0.45)
  seed = np.random.default_rng(overrides['seed']).normal() * 0.05
  own = (
    np.random.default_rng([int(gamma * 100), overrides['seed']]).normal()
    * 0.004
  )
  shift = 0.02 * len(overrides.get('init.rule', ''))
  return 4.2 + (gamma - 0.8) ** 2 + shift + seed + own


def fake_sweep(folder, arms, seeds=3, steps=400):
  """Writes the files of a finished sweep; returns its cells."""
  cells = []
  for arm in arms:
    for seed in range(seeds):
      overrides = {**arm, 'seed': seed}
      cell = {'id': _cell_id(overrides), 'overrides': overrides}
      cells.append(cell)
      final = fake_loss(overrides)
      where = folder / cell['id']
      noise = np.random.default_rng(seed)
      writer = metric_writer.JsonlWriter(where / 'metrics.jsonl')
      scale = 20 * (1 + arm.get('init.gamma', 0.3))
      for step in range(1, steps + 1):
        loss = final + (8.3 - final) * math.exp(-step / scale)
        loss += noise.normal() * 0.05
        writer.write(step, {'train/loss': loss})
      writer.close()
      result = {
        'status': 'done',
        'steps': steps,
        'metrics': {
          'heldout/loss': final,
          'heldout/loss_stderr': 0.01,
          'heldout/tokens': 4096,
          'heldout/bits_per_byte': final / 2.5,
        },
        'timing': {'seconds': 12.3456},
      }
      files.write_json(where / 'results.json', result)
  files.write_json(folder / 'sweep.json', {'cells': cells})
  return cells


GRID = [{'init.gamma': g} for g in GAMMAS] + [{'init.rule': r} for r in RULES]


@pytest.fixture
def sweep(tmp_path):
  fake_sweep(tmp_path, GRID[:2], seeds=3, steps=3)
  return tmp_path


def _text(arms):
  stream = io.StringIO()
  report.print_table(arms, rich.console.Console(file=stream, width=120))
  return stream.getvalue()


def test_results_csv_is_exact_and_without_times(sweep):
  rows = results.collect(sweep)
  results.write_results_csv(rows, sweep / 'results.csv')
  text = (sweep / 'results.csv').read_text()
  assert '12.3456' not in text
  table = list(csv.DictReader(io.StringIO(text)))
  assert list(table[0]) == [
    'id',
    'status',
    'init.gamma',
    'seed',
    'steps',
    'heldout/loss',
    'heldout/loss_stderr',
    'heldout/tokens',
    'heldout/bits_per_byte',
  ]
  assert [line['id'] for line in table] == [
    cell['id'] for cell in files.read_json(sweep / 'sweep.json')['cells']
  ]
  first = files.read_json(sweep / table[0]['id'] / 'results.json')
  assert table[0]['heldout/loss'] == repr(first['metrics']['heldout/loss'])
  assert table[0]['heldout/tokens'] == '4096'


def test_unfinished_cells_are_rows_without_numbers(sweep):
  ids = [cell['id'] for cell in files.read_json(sweep / 'sweep.json')['cells']]
  (sweep / ids[0] / 'results.json').unlink()
  for cell, reason in zip(ids[1:4], ['step 7: nan', 'preempted', None]):
    (sweep / cell / 'results.json').unlink()
    files.write_json(
      sweep / cell / 'run.json', {'attempts': [{'exit': reason}]}
    )
  rows = results.collect(sweep)
  assert [row.status for row in rows] == [
    'missing',
    'failed',
    'missing',
    'missing',
    'done',
    'done',
  ]
  assert not any(row.numbers for row in rows[:4])
  arms = results.summarize(rows)
  text = _text(arms)
  assert 'none' in text and '2 of 3' in text and '0 of 3' in text
  assert f'{ids[1]} (failed)' in text.replace('\n', ' ')


def test_differences_are_paired_by_seed(tmp_path):
  fake_sweep(tmp_path, GRID[:2], steps=1)
  arms = results.summarize(results.collect(tmp_path))
  ours = np.array([list(arm.values.values()) for arm in arms])
  gap = ours[1] - ours[0]
  assert arms[1].difference.mean == pytest.approx(gap.mean())
  # t(0.975, 2 degrees of freedom), from a printed table.
  assert arms[1].difference.half == pytest.approx(
    4.302653 * gap.std(ddof=1) / math.sqrt(3), rel=1e-6
  )
  assert arms[1].difference.half < arms[1].loss.half / 2  # pairs help here
  # Without seed 0 of the first arm two pairs are left, and the table says so.
  (tmp_path / 'gamma=0.3,seed=0' / 'results.json').unlink()
  arms = results.summarize(results.collect(tmp_path))
  assert arms[1].difference.mean == pytest.approx(gap[1:].mean())
  assert arms[1].difference.n == 2
  assert '(2 pairs)' in _text(arms)


@pytest.mark.parametrize(
  ('seeds', 'width', 'star'),
  [(1, False, False), (2, True, True), (3, True, False)],
)
def test_few_seeds_are_marked(tmp_path, seeds, width, star):
  fake_sweep(tmp_path, GRID[:1], seeds=seeds, steps=1)
  arms = results.summarize(results.collect(tmp_path))
  cell = report.show(arms[0].loss)
  assert ('±' in cell, '*' in cell) == (width, star)
  assert ('indicative only' in _text(arms)) == star
  assert math.isnan(arms[0].loss.half) == (not width)


def test_labels_name_what_varies():
  def labels(*arms):
    keys = results.varying(arms)
    return [results.label(arm, keys) for arm in arms]

  assert labels(
    {'size': 'tiny', 'init.gamma': 0.5}, {'size': 'tiny', 'init.rule': 'he'}
  ) == ['gamma=0.5', 'rule=he']
  assert labels({'a.lr': 1, 'b.lr': 2}, {'a.lr': 2, 'b.lr': 1}) == [
    'a.lr=1, b.lr=2',
    'a.lr=2, b.lr=1',
  ]
  assert labels({}) == ['all']


def test_best_at_the_edge_is_said(tmp_path):
  fake_sweep(tmp_path / 'a', GRID[:3], seeds=1, steps=1)
  arms = results.summarize(results.collect(tmp_path / 'a'))
  assert 'init.gamma=0.75, an edge of the grid' in report.markdown(arms)
  fake_sweep(tmp_path / 'b', GRID, seeds=1, steps=1)
  arms = results.summarize(results.collect(tmp_path / 'b'))
  assert 'edge' not in report.markdown(arms)


def test_folder_that_is_no_sweep(tmp_path):
  with pytest.raises(errors.ConfigError, match='must be the folder of a sweep'):
    results.collect(tmp_path)


def test_report_is_the_same_twice(tmp_path):
  fake_sweep(tmp_path, GRID, seeds=2, steps=60)
  console = rich.console.Console(file=io.StringIO())
  names = ('results.csv', 'report/table.md', 'report/loss.png')
  report.write_report(tmp_path, console)
  first = [(tmp_path / name).read_bytes() for name in names]
  report.write_report(tmp_path, console)
  assert first == [(tmp_path / name).read_bytes() for name in names]


@pytest.mark.parametrize(
  'arms',
  [
    [{}],
    [{'opt.lr': lr} for lr in (1e-3, 2e-3)],
    [{'size': s, 'init.gamma': g} for s in ('a', 'b') for g in GAMMAS],
  ],
)
def test_plot_of_other_grids(tmp_path, arms):
  cells = fake_sweep(tmp_path, arms, seeds=1, steps=2)
  (tmp_path / cells[0]['id'] / 'metrics.jsonl').unlink()  # not all is kept
  report.write_report(tmp_path, rich.console.Console(file=io.StringIO()))
  assert (tmp_path / 'report' / 'loss.png').read_bytes()[:4] == b'\x89PNG'


def test_nothing_finished_gives_no_plot(tmp_path):
  cell = {'id': 'seed=0', 'overrides': {'seed': 0}}
  files.write_json(tmp_path / 'sweep.json', {'cells': [cell]})
  report.write_report(tmp_path, rich.console.Console(file=io.StringIO()))
  assert (tmp_path / 'results.csv').read_text() == (
    'id,status,seed\nseed=0,missing,0\n'
  )
  assert not (tmp_path / 'report' / 'loss.png').exists()


def test_without_matplotlib_the_table_still_comes(tmp_path, monkeypatch):
  fake_sweep(tmp_path, GRID[:1], seeds=1, steps=1)
  monkeypatch.delattr('gamma_jax.report_plot', raising=False)
  monkeypatch.setitem(__import__('sys').modules, 'gamma_jax.report_plot', None)
  stream = io.StringIO()
  report.write_report(tmp_path, rich.console.Console(file=stream))
  assert 'pip install gamma_jax[report]' in stream.getvalue()
  assert (tmp_path / 'report' / 'table.md').exists()


def test_spread_keeps_order_and_distance():
  from gamma_jax import report_plot

  y = np.array([0.0, 1.0, 2.0, 50.0])
  moved = report_plot.spread(y, gap=10.0)
  np.testing.assert_allclose(moved, [-9.0, 1.0, 11.0, 50.0])


def test_smoothing_keeps_a_flat_curve_and_the_first_steps():
  from gamma_jax import report_plot

  np.testing.assert_allclose(report_plot.smooth(np.ones(300)), 1.0)
  spike = np.zeros(300)
  spike[[3, 200]] = 1.0
  out = report_plot.smooth(spike)
  assert out[3] == 1.0 and out[2] == 0.0
  assert out[200] == pytest.approx(1 / 21)

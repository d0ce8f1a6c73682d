"""A sweep folder -> results.csv, tables, page, pictures."""

import csv
import html.parser
import io
import math
import pathlib
import urllib.parse

import numpy as np
import pytest
import rich.console

from gamma_jax import errors, files, report, report_tables, results
from tests import fake_sweep
from tests.fake_sweep import GAMMAS, GRID, RULES


@pytest.fixture
def sweep(tmp_path):
  fake_sweep.write(tmp_path, GRID[:2], seeds=3, steps=3)
  return tmp_path


def write(folder):
  """The report; returns what the terminal saw, in one line."""
  stream = io.StringIO()
  report.write_report(folder, rich.console.Console(file=stream, width=120))
  return ' '.join(stream.getvalue().split())


class _Page(html.parser.HTMLParser):
  """Collects links, images and the balance of tags."""

  VOID = ('meta', 'img', 'br')

  def __init__(self, text):
    super().__init__()
    self.links, self.images, self.open, self.text = [], [], [], ''
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    attrs = dict(attrs)
    self.links += [attrs['href']] if 'href' in attrs else []
    self.images += [attrs['src']] if 'src' in attrs else []
    if tag not in self.VOID:
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text += data


def page(folder):
  """The page, checked: well formed, nothing from outside, no dead link."""
  where = folder / 'report'
  found = _Page((where / 'index.html').read_text(encoding='utf-8'))
  assert not found.open
  assert all(src.startswith('data:image/png;base64,') for src in found.images)
  for link in found.links:
    assert (where / urllib.parse.unquote(link)).exists(), link
  found.text = ' '.join(found.text.split())
  return found


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
  (sweep / ids[0] / 'run.json').unlink()
  for cell, reason in zip(ids[1:4], ['step 7: nan', 'preempted', None]):
    fake_sweep.fail(sweep / cell, reason)
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
  text = write(sweep)
  assert 'none' in text and '2 of 3' in text and '0 of 3' in text
  assert f'{ids[1]} (failed)' in text
  assert 'gamma=0.3, has no finished cell' in text
  assert 'failed: step 7: nan' in page(sweep).text


@pytest.mark.parametrize(
  ('seeds', 'width', 'star'),
  [(1, False, True), (2, True, True), (3, True, False)],
)
def test_few_seeds_are_marked(tmp_path, seeds, width, star):
  fake_sweep.write(tmp_path, GRID[:1], seeds=seeds, steps=1)
  arms = results.summarize(results.collect(tmp_path))
  cell = report_tables.show(arms[0].loss)
  assert ('±' in cell, '*' in cell) == (width, star)
  assert ('indicative only' in write(tmp_path)) == star
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


def test_folder_that_is_no_sweep(tmp_path):
  with pytest.raises(errors.ConfigError, match='must be the folder of a sweep'):
    results.collect(tmp_path)


def test_report_is_the_same_twice(tmp_path):
  fake_sweep.write(tmp_path, GRID[:5], seeds=2, steps=10)
  write(tmp_path)
  names = ['results.csv', *(f'report/{p.name}' for p in _files(tmp_path))]
  assert {'report/index.html', 'report/table.md'} < set(names)
  first = [(tmp_path / name).read_bytes() for name in names]
  write(tmp_path)
  assert first == [(tmp_path / name).read_bytes() for name in names]


def _files(folder) -> list[pathlib.Path]:
  return sorted((folder / 'report').iterdir())


@pytest.mark.parametrize(
  ('arms', 'pictures'),
  [
    ([{}], 2),
    ([{'opt.lr': lr} for lr in (1e-3, 2e-3)], 2),
    ([{'init.rule': rule} for rule in RULES], 2),
    ([{'init.gamma': 0.5}, {'init.rule': 'he'}], 2),
    (
      [
        {'init.gamma': g, 'init.depth_scale': d, 'model.gate': gate}
        for g in (0.5, 1.0)
        for d in (False, True)
        for gate in ('none', 'headwise')
      ],
      2,
    ),
    (
      [
        {'init.gamma': g, 'opt.lr': lr, 'size': s}
        for g in (0.5, 1.0)
        for lr in (1e-3, 2e-3)
        for s in ('16M', '38M')
      ],
      3,
    ),
  ],
)
def test_pages_of_other_grids(tmp_path, arms, pictures):
  cells = fake_sweep.write(tmp_path, arms, seeds=2, steps=2)
  (tmp_path / cells[0]['id'] / 'metrics.jsonl').unlink()  # not all is kept
  write(tmp_path)
  assert len(page(tmp_path).images) == pictures
  for path in (tmp_path / 'report').glob('*.png'):
    assert path.read_bytes()[:4] == b'\x89PNG'


def test_nothing_finished_gives_a_page_without_plots(tmp_path):
  cell = {'id': 'seed=0', 'overrides': {'seed': 0}}
  files.write_json(tmp_path / 'sweep.json', {'cells': [cell]})
  write(tmp_path)
  assert (tmp_path / 'results.csv').read_text() == (
    'id,status,seed\nseed=0,missing,0\n'
  )
  found = page(tmp_path)
  assert not found.images
  assert '0 of 1 cells finished' in found.text


def test_without_matplotlib_tables_and_page_still_come(tmp_path, monkeypatch):
  fake_sweep.write(tmp_path, GRID[:1], seeds=1, steps=1)
  monkeypatch.delattr('gamma_jax.report_plot', raising=False)
  monkeypatch.setitem(__import__('sys').modules, 'gamma_jax.report_plot', None)
  assert 'pip install gamma_jax[report]' in write(tmp_path)
  assert (tmp_path / 'report' / 'table.md').exists()
  assert 'gamma=0.3,seed=0' in page(tmp_path).text


def test_page_of_a_ladder_with_faults(tmp_path):
  sizes = fake_sweep.SIZES
  fake_sweep.write(tmp_path, fake_sweep.ladder(), steps=4)
  fake_sweep.fail(
    tmp_path / 'size=16M,gamma=1.0,seed=1', 'NonFiniteLoss: <step 7>'
  )
  fake_sweep.write_results(tmp_path / 'size=38M,gamma=0.75,seed=2', math.nan)
  for path in (tmp_path / 'size=67M,gamma=0.3,seed=0').iterdir():
    path.unlink()
  odd = tmp_path / 'size=16M,gamma=0.3,seed=1' / 'config.json'
  config = files.read_json(odd)
  config['data']['source'] = 'jsonl:<i>'
  files.write_json(odd, config)
  write(tmp_path)
  found = page(tmp_path)
  for text in (
    'jsonl:<i>',
    '34 of 36 cells finished, 12 arms',
    'size=67M,gamma=0.3,seed=0 (missing)',
    'failed: NonFiniteLoss: <step 7>',
    'size=38M, gamma=0.75, seed=2: heldout/loss is missing or not finite',
    'not corrected for the 9 comparisons',
    'seeds for ± 0.01',
    'Three sizes fix the curve',
    'N, non-embedding parameters',
    '0123456789ab',
    '--config=<a & b>',
  ):
    assert text in found.text, text
  for size in sizes:
    assert f'at size={size}' in found.text
  # What varies is a column, what does not is folded away.
  raw = (tmp_path / 'report' / 'index.html').read_text()
  before, _, after = raw.partition('<summary>What all cells share')
  assert '>model.D</th>' in before and 'model.V' not in before
  assert '<td class="words">model.V</td>' in after
  assert '../size%3D16M%2Cgamma%3D0.3%2Cseed%3D0/init_report.txt' in found.links
  for text in ('<step 7>', '<a & b>', '<i>'):
    assert text not in raw  # escaped


def test_cells_of_different_code_are_said(sweep):
  one = next(sweep.glob('gamma=0.5,seed=1/run.json'))
  run = files.read_json(one)
  run['attempts'][0]['git']['dirty'] = True
  files.write_json(one, run)
  write(sweep)
  text = page(sweep).text
  assert 'made with 2 different sets of code' in text
  assert '0123456789ab + changes ab' in text


def test_traces_are_drawn_where_logged(tmp_path):
  fake_sweep.write(tmp_path, GRID[1:3], seeds=1, steps=6, traces=True)
  write(tmp_path)
  names = {path.name for path in (tmp_path / 'report').glob('*.png')}
  assert names == {
    'loss.png',
    'curves.png',
    'rms.png',
    'stable_rank.png',
    'sink.png',
    'sink_by_layer.png',
    'residual.png',
  }
  assert len(page(tmp_path).images) == len(names)


def test_layers_and_seeds_are_averaged(tmp_path):
  from gamma_jax import metric_writer, report_plot_traces

  fake_sweep.write(tmp_path, [{}], seeds=2, steps=2)
  for seed in range(2):
    path = tmp_path / f'seed={seed}' / 'metrics.jsonl'
    path.unlink()
    writer = metric_writer.JsonlWriter(path)
    for step in range(1, 4 - seed):  # one seed has a step more
      columns = {
        'train/loss': float(seed),
        'condense/stable_rank/q/0': 10.0 * step + seed,
        'condense/stable_rank/q/1': 10.0 * step + seed + 4,
        'perf/tokens_per_second': 1.0,
      }
      writer.write(step, columns)
    writer.close()
  (arm,) = results.summarize(results.collect(tmp_path))
  traces = report_plot_traces.traces(arm)
  assert set(traces) == {'train/loss', 'condense/stable_rank'}
  steps, ranks = traces['condense/stable_rank']['q']
  np.testing.assert_array_equal(steps, [1, 2])
  np.testing.assert_allclose(ranks, [12.5, 22.5])


def test_gamma_is_a_sequential_colour_and_rules_are_grey():
  from gamma_jax import report_style

  look = report_style.looks(
    [{'init.gamma': g} for g in reversed(GAMMAS)] + [{'init.rule': 'he'}]
  )
  *colours, rule = (style['color'] for style in look.values())
  light = [
    0.2126 * red + 0.7152 * green + 0.0722 * blue
    for red, green, blue, _ in colours
  ]
  assert light == sorted(light, reverse=True)  # large gamma is light
  assert rule == report_style.GREY


def test_spread_keeps_order_and_distance():
  from gamma_jax import report_style

  y = np.array([0.0, 1.0, 2.0, 50.0])
  moved = report_style.spread(y, gap=10.0)
  np.testing.assert_allclose(moved, [-9.0, 1.0, 11.0, 50.0])


def test_smoothing_keeps_a_flat_curve_and_the_first_steps():
  from gamma_jax import report_plot_traces

  smooth = report_plot_traces.smooth
  np.testing.assert_allclose(smooth(np.ones(300)), 1.0)
  spike = np.zeros(300)
  spike[[3, 200]] = 1.0
  out = smooth(spike)
  assert out[3] == 1.0 and out[2] == 0.0
  assert out[200] == pytest.approx(1 / 21)

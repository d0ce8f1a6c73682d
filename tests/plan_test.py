"""The plan: targets, the search, what is printed, what is kept."""

import dataclasses
import io

import jax
import pytest
import rich.console

from configs import sweep_1p5b, sweep_tiny
from gamma_jax import (
  ahead_of_time,
  chips,
  command_line,
  configure,
  files,
  init_report,
  plan,
  plan_report,
  sweep,
)
from gamma_jax.config import Config, PlanConfig
from gamma_jax.errors import ConfigError


def cells_of(module, **plan_fields):
  base = configure.resolve(module.get_config())
  return [
    dataclasses.replace(
      cell,
      config=dataclasses.replace(cell.config, plan=PlanConfig(**plan_fields)),
    )
    for cell in sweep.expand(base, module.sweep)
  ]


def printed(cells, workdir=None):
  """(text, returned) of a plan."""
  console = rich.console.Console(file=io.StringIO())
  out = plan_report.print_plan(cells, workdir, console)
  return console.file.getvalue(), out


@pytest.mark.parametrize(
  ('text', 'topology'),
  [
    ('v5e:8x8', 'v5e:8x8'),
    ('v5p:2x2x1', 'v5p:2x2x1'),
    ('h100:4', '1x1x4'),
    ('h100:8', '1x1x8'),
    ('h100:64', '1x8x8'),
  ],
)
def test_targets(text, topology):
  assert chips.parse(text).topology == topology


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('v5:8x8', "no chip 'v5'; write for example v5e:8x8, .*did you mean 'v5"),
    ('a100:8', "no chip 'a100'; write"),
    ('v5e', 'does not say how many chips; write for example v5e:8x8'),
    ('v5e:64', 'does not say how many chips'),
    ('h100:8x8', 'does not say how many chips; write for example h100:64'),
    ('h100:0', 'does not say how many chips'),
    ('h100:12', 'must fill hosts of 8 GPUs'),
  ],
)
def test_a_bad_target_is_one_line(text, message):
  config = dataclasses.replace(Config(), plan=PlanConfig(target=text))
  with pytest.raises(ConfigError, match=message) as caught:
    configure.validate(config)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('target', 'extra'), [('v5e:8x8', 'plan-tpu'), ('h100:8', 'plan-gpu')]
)
def test_a_missing_compiler_names_its_extra(target, extra, monkeypatch):
  monkeypatch.setattr(
    ahead_of_time.importlib.util, 'find_spec', lambda name: None
  )
  with pytest.raises(ConfigError) as caught:
    ahead_of_time.devices(chips.parse(target))
  assert str(caught.value) == (
    f'plan.target={target} needs the compiler of these chips: pip install '
    f"'gamma_jax[{extra}]'"
  )


@pytest.mark.parametrize(
  ('limit', 'start', 'expected'),
  [
    (20, 4, (20, 22)),  # within an eighth
    (5, 4, (5, 6)),
    (1, 8, (1, 2)),
    (0, 8, (0, 1)),
    (10**9, 1, (128, None)),  # out of tries
  ],
)
def test_search_for_the_largest(limit, start, expected):
  asked = []

  def fits(n):
    asked.append(n)
    return n <= limit

  assert ahead_of_time.largest(fits, start, 8) == expected
  assert len(asked) == len(set(asked)) <= 8


def test_the_estimate_knows_who_shares_experts():
  config = command_line.parse(
    ['x', '--config=configs/moe.py:sizes=0.2B', '--mode=plan']
  )
  config = config.cells[0].config
  mesh = dataclasses.replace(config.mesh, expert=8)
  apart = plan.bytes_per_device(config, 64)
  shared = plan.bytes_per_device(dataclasses.replace(config, mesh=mesh), 64)
  assert shared['layer'] > 2 * apart['layer']
  assert shared['gathered'] < apart['gathered']


def test_with_rows_gives_each_chip_that_many():
  config = (
    command_line.parse(['x', '--config=configs/sweep_1p5b.py', '--mode=plan'])
    .cells[0]
    .config
  )
  devices = tuple(jax.devices())
  train = dataclasses.replace(config.train, accumulation=2)
  config = dataclasses.replace(config, train=train)
  more = ahead_of_time.with_rows(config, devices, 3)
  assert more.train.batch_size == 3 * 2 * 8
  configure.check_devices(more, 8)


def test_state_is_spread_by_fsdp_and_copied_by_data():
  model = Config().model
  config = Config(mesh=dataclasses.replace(Config().mesh, data=1, fsdp=-1))
  devices = tuple(jax.devices())
  held, share = ahead_of_time.state_bytes(config, devices)
  assert held < 1.01 * share
  held, share = ahead_of_time.state_bytes(Config(model=model), devices)
  assert held == pytest.approx(8 * share)


def test_large_grid_is_predicted_without_data():
  cells = cells_of(sweep_1p5b)
  text, out = printed(cells)
  assert len(out['cells']) == 75
  arms = out['init']
  assert len(arms) == 25  # 5 sizes, 4 gammas and a fixed std; seeds share
  assert {len(arm['cells']) for arm in arms} == {3}
  assert {arm['report']['source'] for arm in arms} == {init_report.PREDICTED}
  assert text.count('Matrices at step 0 (predicted)') == 5
  assert text.count('Init (predicted)') == 25
  assert 'a batch is too much for a CPU' in text
  assert "within 100x of Adam's eps" in text
  assert '…' not in text


def test_small_grid_is_drawn_and_kept(tmp_path):
  base = configure.resolve(sweep_tiny.get_config())
  data = dataclasses.replace(base.data, dir=str(tmp_path / 'data'))
  base = dataclasses.replace(base, data=data)
  cells = sweep.expand(base, sweep_tiny.sweep)[:2]
  text, out = printed(cells, tmp_path / 'w')
  reports = [arm['report'] for arm in out['init']]
  assert [r['source'] for r in reports] == [init_report.MEASURED] * 2
  assert all(m['z'] is not None for m in reports[0]['matrices'])
  assert text.count('Matrices at step 0 (measured)') == 1
  kept = (tmp_path / 'w' / 'plan.txt').read_text()
  assert 'Init (measured)' in kept and cells[0].id in kept
  loaded = files.from_json((tmp_path / 'w' / 'plan.json').read_text())
  assert loaded['cells'][0]['flops'] == out['cells'][0]['flops']


def test_missing_data_is_said_not_fatal():
  base = configure.resolve(sweep_tiny.get_config())
  data = dataclasses.replace(base.data, source='jsonl:/nowhere/*.jsonl')
  cells = sweep.expand(dataclasses.replace(base, data=data), sweep_tiny.sweep)
  text, out = printed(cells[:1])
  assert out['init'][0]['report']['source'] == init_report.PREDICTED
  assert 'predicted, not drawn: ' in text and '/nowhere' in text


@pytest.fixture
def compiler(monkeypatch):
  """A compiler that gives GIB a row and refuses more than 20."""

  def compile_step(config, where):
    shards = ahead_of_time.row_shards(config, where)
    rows = config.train.batch_size // shards
    if rows > 20:
      return ahead_of_time.Step(rows, None, 'Ran out of memory')
    return ahead_of_time.Step(rows, rows * plan.GIB, '')

  monkeypatch.setattr(
    ahead_of_time, 'devices', lambda target: tuple(jax.devices())
  )
  monkeypatch.setattr(ahead_of_time, 'compile_step', compile_step)


def tiny(batch, **plan_fields):
  cell = cells_of(sweep_tiny, target='v5e:2x4', **plan_fields)[0]
  train = dataclasses.replace(cell.config.train, batch_size=batch)
  config = dataclasses.replace(cell.config, train=train)
  return [dataclasses.replace(cell, config=config)]


def test_target_table(compiler):
  text, out = printed(tiny(8 * 4, largest_batch=True))
  (shape,) = out['shapes']
  assert (shape['rows'], shape['peak_bytes']) == (4, 4 * plan.GIB)
  assert shape['fits'] and shape['largest_rows'] == 14  # 0.9 * 15.75 = 14.2
  assert shape['smallest_refused_rows'] == 15
  assert 'a chip holds 8.0 times its share of weights and moments' in text
  work = out['cells'][0]['flops']
  hours = work / (0.4 * 197e12) / 3600
  assert shape['device_hours_a_cell'] == pytest.approx(hours)
  assert 'an assumption' in text and 'Matrices' not in text


@pytest.mark.parametrize(
  ('rows', 'why'), [(15, 'it passes 90% of the memory'), (21, 'Ran out of')]
)
def test_what_does_not_fit_is_printed_kept_and_refused(
  compiler, tmp_path, rows, why
):
  with pytest.raises(ConfigError, match='does not fit v5e:2x4: take more'):
    printed(tiny(8 * rows), tmp_path)
  kept = (tmp_path / 'plan.txt').read_text()
  assert f'does not fit: {why}' in kept
  shape = files.from_json((tmp_path / 'plan.json').read_text())['shapes'][0]
  assert not shape['fits']


def test_estimate_of_the_loss_counts_a_chunk_over_all_devices():
  cell = cells_of(sweep_1p5b)[-1]
  need = plan.bytes_per_device(cell.config, 64)
  # 4 rows a device, 8192 / 64 = 128 tokens of logits; see losses.token_losses.
  hidden = 4 * 2 * 4 * 4096 * 2048
  assert need['logits'] == 3 * 4 * 128 * 100352 + hidden

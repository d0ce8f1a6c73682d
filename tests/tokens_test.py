"""Two cells through the command line: files, numbers, refusals."""

import csv
import dataclasses
import json
import sys

import jax
import numpy as np
import pytest

from gamma_jax import (
  checkpoint,
  configure,
  files,
  program,
  sharding,
  token_rows,
  tokens,
  train_step,
)
from gamma_jax.analysis import token_gap
from gamma_jax.config import (
  CheckpointConfig,
  Config,
  DataConfig,
  EvalConfig,
  MeshConfig,
  ModelConfig,
  TrainConfig,
)
from gamma_jax.data import pipeline
from gamma_jax.errors import ConfigError

DOCUMENTS = 8


class NoData:
  """Stands for the data of a run."""

  def get_state(self):
    return []


def make_cell(folder, config, std):
  """A cell whose parameters are N(0, std^2), all of them."""
  devices = sharding.devices_for(config.mesh)
  built = program.build(configure.program_key(config), devices)
  rng = np.random.default_rng(config.seed)
  params = jax.tree.map(
    lambda x: rng.normal(0, std, x.shape).astype(x.dtype),
    built.abstract_state.params,
  )
  state = train_step.TrainState(
    np.int32(1), np.bool_(True), params, opt_state=(), moe_state={}
  )
  files.write_json(folder / 'config.json', configure.to_dict(config))
  saver = checkpoint.Checkpointer(folder / 'checkpoints', CheckpointConfig())
  saver.save(1, state, NoData(), {})
  saver.close()
  return folder


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  folder = tmp_path_factory.mktemp('data')
  rng = np.random.default_rng(0)
  texts = [
    f'{i} ' + ''.join(rng.choice(list('ab <學而'), i)) for i in range(60)
  ]
  lines = '\n'.join(json.dumps({'text': text}) for text in texts)
  (folder / 'en.jsonl').write_text(lines)
  return Config(
    model=ModelConfig(D=8, F=16, L=1, N=2, K=1, H=4, V=257, mlp='gelu'),
    train=TrainConfig(batch_size=8, seq_len=32),
    data=DataConfig(
      source=f'jsonl:{folder}/*.jsonl',
      tokenizer='bytes',
      dir=str(folder / 'prepared'),
      heldout_percent=50,
    ),
    eval=EvalConfig(batch_size=8),
  )


@pytest.fixture(scope='module')
def cells(base, tmp_path_factory):
  """Two of different shapes."""
  folder = tmp_path_factory.mktemp('cells')
  wide = dataclasses.replace(base.model, D=16, gate='none')
  b = dataclasses.replace(base, model=wide, seed=1)
  return make_cell(folder / 'a', base, 0.01), make_cell(folder / 'b', b, 1.0)


def compare(a, b, out, *more):
  arguments = [str(a), str(b), f'--out={out}', f'--documents={DOCUMENTS}']
  return tokens.main([*arguments, '--bins=5', *more])


def read(out):
  with open(out / 'bins.csv', newline='') as f:
    return list(csv.DictReader(f))


def test_two_shapes_are_compared_token_by_token(base, cells, tmp_path, capsys):
  parquet = pytest.importorskip('pyarrow.parquet')
  a, b = cells
  assert compare(a, b, tmp_path / 'ab', '--parquet') == 0
  text = capsys.readouterr().out
  assert f'of {DOCUMENTS} documents' in text and 'index.html' in text
  rows = list(token_rows.Rows(tmp_path / 'ab' / 'rows'))
  doc, position, token, nll_a, nll_b = map(np.concatenate, zip(*rows))
  # Every token of every document once, in its place.
  framed = [t for _, t in pipeline.heldout_documents(base.data)][:DOCUMENTS]
  for i, want in enumerate(framed):
    order = np.argsort(position[doc == i])
    np.testing.assert_array_equal(token[doc == i][order][:-1], want)
    np.testing.assert_array_equal(
      position[doc == i][order], np.arange(len(want) + 1)
    )
  table = parquet.read_table(tmp_path / 'ab' / 'tokens.parquet')
  np.testing.assert_array_equal(table['nll_b'], nll_b)
  # Small weights say nothing, which costs ln V; large ones say what is wrong.
  assert nll_a.mean() == pytest.approx(np.log(257), abs=0.01)
  assert nll_b.mean() > 6
  lines = read(tmp_path / 'ab')
  assert [x['by'] for x in lines][:6] == ['all'] + ['difficulty'] * 5
  assert float(lines[0]['gain']) == pytest.approx((nll_b - nll_a).mean())
  assert float(lines[0]['gain_low']) > 0
  page = (tmp_path / 'ab' / 'index.html').read_text()
  assert '<b>a</b> is a, step 1.' in page and '<pre class="text">' in page


def test_the_other_way_round_and_against_itself(cells, tmp_path):
  a, b = cells
  for x, y, name in ((a, b, 'ab'), (b, a, 'ba'), (b, b, 'bb')):
    assert compare(x, y, tmp_path / name) == 0
  ab, ba, bb = (read(tmp_path / name) for name in ('ab', 'ba', 'bb'))
  for one, two in zip(ab, ba, strict=True):
    assert one['tokens'] == two['tokens']
    for key in ('gain', 'delta_sym', 'contribution'):
      assert float(one[key]) == pytest.approx(-float(two[key]), abs=1e-12)
  for one in bb:
    assert float(one['gain']) == float(one['delta_sym']) == 0
  assert 'There is no such token' in (tmp_path / 'bb/index.html').read_text()


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'train.seq_len': 64}, 'train.seq_len (32 and 64)'),
    ({'data.tokenizer': 'bpe4k'}, 'data.tokenizer (bytes and bpe4k)'),
    ({'data.heldout_percent': 9.0}, 'hold out different documents'),
    ({'data.source': 'anchor', 'data.tokenizer': 'none'}, 'no held-out text'),
  ],
)
def test_cells_that_cannot_be_compared_are_refused(
  base, cells, tmp_path, capsys, change, message
):
  config = base
  for path, value in change.items():
    config = configure.replace_by_path(config, path, value)
  files.write_json(tmp_path / 'c' / 'config.json', configure.to_dict(config))
  assert compare(cells[0], tmp_path / 'c', tmp_path / 'out') == 2
  assert message in capsys.readouterr().err
  assert not (tmp_path / 'out').exists()


def test_bad_arguments_are_refused(cells, tmp_path, capsys):
  a, b = cells
  (tmp_path / 'full').mkdir()
  (tmp_path / 'full' / 'thesis.txt').touch()
  for arguments, message in (
    ((a, b, tmp_path / 'full'), 'not an empty folder'),
    ((a, b, tmp_path / 'out', '--bins=0'), '--bins=0'),
    ((a, b, tmp_path / 'out', '--documents=-1'), '--documents=-1'),
    ((a, b, tmp_path / 'out', '--step_b=7'), 'no complete checkpoint 7'),
    ((a, tmp_path, tmp_path / 'out'), 'not the folder of a cell'),
  ):
    assert compare(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith('error: ') and message in err
  assert not (tmp_path / 'out').exists()


def test_a_mesh_is_kept_where_it_fits_and_left_where_it_does_not(base):
  for mesh, batch_size, devices in (
    (MeshConfig(), 8, 1),
    (MeshConfig(data=8), 8, 8),
    (MeshConfig(data=8), 9, 1),
    (MeshConfig(data=16), 16, 1),
  ):
    config = dataclasses.replace(base, mesh=mesh)
    placed, found = tokens._placed(config, batch_size)
    assert len(found) == devices
    assert placed.mesh == (mesh if devices == 8 else MeshConfig())


def test_rows_come_back_in_blocks(tmp_path):
  rng = np.random.default_rng(0)
  blocks = [
    token_gap.Block(*(rng.integers(0, 9, n).astype(d) for d in 'iiHff'))
    for n in (5, 3, 9, 1)
  ]
  rows = token_rows.write(tmp_path / 'rows', iter(blocks), rows=8)
  assert [len(block.doc) for block in rows] == [8, 9, 1]
  for _ in range(2):  # as often as wanted
    for column, got in zip(zip(*blocks), zip(*rows), strict=True):
      np.testing.assert_array_equal(np.concatenate(column), np.concatenate(got))
      assert column[0].dtype == got[0].dtype


def test_rows_as_parquet(tmp_path, monkeypatch):
  parquet = pytest.importorskip('pyarrow.parquet')
  rng = np.random.default_rng(0)
  blocks = [
    token_gap.Block(*(rng.integers(0, 9, n).astype(d) for d in 'iiHff'))
    for n in (5, 3)
  ]
  token_rows.to_parquet(iter(blocks), tmp_path / 'x.parquet')
  file = parquet.ParquetFile(tmp_path / 'x.parquet')
  assert file.num_row_groups == 2  # one in memory at a time
  table = file.read()
  for name, column in zip(token_gap.Block._fields, zip(*blocks), strict=True):
    got = table[name].to_numpy()
    np.testing.assert_array_equal(got, np.concatenate(column))
    assert got.dtype == column[0].dtype
  monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
  with pytest.raises(ConfigError, match=r'gamma_jax\[parquet\]'):
    token_rows.need_parquet()

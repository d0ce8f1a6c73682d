"""The composite-anchor task: rows, split, loss, shares, and whole runs."""

import json
import math
import shutil

import jax
import numpy as np
import pytest

from gamma_jax import (
  anchor_shares,
  configure,
  findings,
  flops,
  grouping,
  metric_writer,
  report_tables,
  results,
  streams,
  sweep,
  train_step,
  trainer,
)
from gamma_jax import program as program_lib
from gamma_jax.config import (
  CheckpointConfig,
  Config,
  DataConfig,
  EvalConfig,
  ModelConfig,
  OptConfig,
  TrainConfig,
)
from gamma_jax.data import anchor, sources
from gamma_jax.errors import ConfigError

CONFIG = Config(
  model=ModelConfig(D=8, F=16, L=1, N=2, K=1, H=4, V=112, mlp='gelu'),
  opt=OptConfig(warmup_steps=1),
  train=TrainConfig(steps=3, batch_size=8, seq_len=9, loss_chunk=64),
  data=DataConfig(source='anchor', tokenizer='none'),
  checkpoint=CheckpointConfig(every=2),
  eval=EvalConfig(batch_size=48, documents=64),
)


# Rows.


@pytest.mark.parametrize(
  ('key', 'pair', 'composed', 'trained'),
  [
    (50, (1, 2), 56, 56),
    (50, (3, 4), 40, 44),  # forced
    (50, (4, 3), 40, 40),
    (99, (1, 1), 109, 109),  # the largest number there is
    (20, (4, 4), 4, 4),
    (20, (2, 3), 19, 19),
  ],
)
def test_known_answers(key, pair, composed, trained):
  args = np.array([key]), np.array([pair])
  assert anchor.composed(*args) == [composed]
  assert anchor.answer(*args) == [trained]
  assert composed < anchor.VOCABULARY


def taken_apart(tokens):
  """(position, key, a, b, answer) of a row, by looking for its anchors."""
  position = min(i for i, token in enumerate(tokens[:9]) if token < 20) - 1
  rest = [*tokens[:position], *tokens[position + 3 : 9]]
  assert len(rest) == 6 and all(20 <= token <= 99 for token in rest)
  return position, *tokens[position : position + 3], tokens[9]


SHIFT = {1: 5, 2: 1, 3: -2, 4: -8}


def test_training_rows_are_right_and_leave_out_what_is_held_out():
  seen = set()
  for step in range(20):
    rows = anchor.training_rows(0, step, 500)
    for tokens in rows.tokens.tolist():
      position, key, a, b, last = taken_apart(tokens)
      assert (a, b) != (4, 3)
      assert position != key % 7
      shift = -6 if (a, b) == (3, 4) else SHIFT[a] + SHIFT[b]
      assert last == key + shift
      seen.add((position, key, (a, b)))
  assert len({pair for *_, pair in seen}) == 15
  assert len({(p, key) for p, key, _ in seen}) == 80 * 6
  assert max(p for p, *_ in seen) == 6


def test_heldout_rows_ask_every_key_at_its_heldout_position():
  rows = anchor.heldout_rows()
  count = {}
  for tokens in rows.tokens.tolist():
    position, key, a, b, _ = taken_apart(tokens)
    assert position == key % 7
    count[key, a, b] = count.get((key, a, b), 0) + 1
  assert len(count) == 80 * 16
  assert set(count.values()) == {anchor.FILLERS}
  some = anchor.heldout_rows(32)
  for field, whole in zip(some, rows, strict=True):
    np.testing.assert_array_equal(field, whole[:32])
  assert len({tuple(pair) for pair in some.pair.tolist()}) == 16
  # The pairs of one row differ in the pair and its answer alone.
  tokens = some.tokens[:16, :9].copy()
  where = some.position[0] + np.array([1, 2])
  tokens[:, where] = 0
  assert (tokens == tokens[0]).all()


def test_an_iterator_goes_on_where_its_state_says():
  first = anchor.TrainIterator(seed=3, batch_size=5)
  before = [next(first) for _ in range(4)]
  state = json.loads(json.dumps(first.get_state()))
  after = [next(first)['tokens'] for _ in range(3)]
  second = anchor.TrainIterator(seed=3, batch_size=5)
  next(second)
  second.set_state(state)
  for want in after:
    np.testing.assert_array_equal(next(second)['tokens'], want)
  hashes = {b['tokens'].tobytes() for b in before}
  assert len(hashes) == 4
  other = next(anchor.TrainIterator(seed=4, batch_size=5))
  assert other['tokens'].tobytes() not in hashes


def test_arms_of_one_seed_read_one_stream():
  both = streams.Streams(
    [CONFIG, configure.replace_by_path(CONFIG, 'init.gamma', 0.5)]
  )
  assert both.member == [0, 0] and len(next(both)) == 1
  assert streams.inputs_per_label(CONFIG) == 9
  assert streams.inputs_per_label(Config()) == 1


# Bad input.


@pytest.mark.parametrize(
  ('path', 'value', 'message'),
  [
    ('train.seq_len', 10, 'train.seq_len=10 must be 9'),
    ('model.V', 109, 'model.V=109 must be at least 110'),
    ('data.tokenizer', 'bytes', "data.tokenizer has no effect .* to 'none'"),
    ('data.mixture', {'en': 1.0}, 'data.mixture has no effect'),
    ('data.workers', 1, 'data.workers has no effect .* to 0'),
  ],
)
def test_what_the_task_fixes_is_checked(path, value, message):
  configure.validate(CONFIG)
  with pytest.raises(ConfigError, match=message):
    configure.validate(configure.replace_by_path(CONFIG, path, value))


def test_there_is_nothing_to_prepare():
  with pytest.raises(ConfigError, match='nothing to prepare'):
    sources.open_source('anchor', None)


# Shares.


def predictor(token, p=0.9):
  """Log-probabilities of one that gives `token` p and all others the same."""
  out = np.full((len(token), 112), (1 - p) / 111)
  out[np.arange(len(token)), token] = p
  return np.log(out)


def test_one_that_composes():
  rows = anchor.heldout_rows()
  got = anchor_shares.summarize(
    predictor(anchor.composed(rows.key, rows.pair), 0.75), rows
  )
  assert got['heldout/accuracy'] == 1 and got['heldout/accuracy/forced'] == 0
  assert got['heldout/loss'] == pytest.approx(-math.log(0.75))
  assert got['heldout/loss/forced'] == pytest.approx(-math.log(0.25 / 111))
  assert got['heldout/tokens'] == 14 * 320
  assert got['heldout/tokens/forced'] == got['heldout/tokens/mirror'] == 320
  assert [
    got[f'heldout/mirror/{k}'] for k in ('compositional', 'symmetric', 'other')
  ] == [1, 0, 0]
  assert got['heldout/mirror/p_compositional'] == pytest.approx(0.75)
  assert got['heldout/mirror/p_other'] == pytest.approx(0.25 * 110 / 111)


def test_one_that_remembers_some_and_guesses_some():
  rows = anchor.heldout_rows(64)  # every pair four times
  token = rows.tokens[:, -1].copy()
  mirror = np.flatnonzero((rows.pair == (4, 3)).all(axis=1))
  token[mirror[:2]] = rows.key[mirror[:2]] - 6
  token[mirror[2]] = 111
  got = anchor_shares.summarize(predictor(token), rows)
  assert got['heldout/accuracy'] == got['heldout/accuracy/forced'] == 1
  shares = {k: v for k, v in got.items() if k.startswith('heldout/mirror/')}
  assert shares == pytest.approx(
    {
      'heldout/mirror/compositional': 0.25,
      'heldout/mirror/symmetric': 0.5,
      'heldout/mirror/other': 0.25,
      'heldout/mirror/p_compositional': (0.9 + 3 * 0.1 / 111) / 4,
      'heldout/mirror/p_symmetric': (1.8 + 2 * 0.1 / 111) / 4,
      'heldout/mirror/p_other': 1 - (2.7 + 5 * 0.1 / 111) / 4,
    }
  )


def test_a_group_without_rows_has_no_metrics():
  rows = anchor.heldout_rows(1)  # of pair (1, 1)
  got = anchor_shares.summarize(predictor(rows.key), rows)
  assert set(got) == {'heldout/loss', 'heldout/accuracy', 'heldout/tokens'}


# Loss and runs.


@pytest.fixture(scope='module')
def program():
  return program_lib.build(configure.program_key(CONFIG), (jax.devices()[0],))


def test_only_the_answer_is_asked_for(program):
  h = train_step.hyper(CONFIG)
  params = program.init(CONFIG).params
  (batch,) = next(streams.Streams([CONFIG]))
  asked = train_step.split_labels(batch)
  gradient = jax.jit(
    lambda labels: train_step.mean_gradient(
      CONFIG, h, params, {**asked, 'labels': labels}, {}
    )
  )
  grads, sums = gradient(asked['labels'])
  assert int(sums.tokens) == 8
  # The loss is that of the answers, as evaluation sees them.
  questions = {k: asked[k] for k in ('inputs', 'segment_ids', 'positions')}
  log_p = np.asarray(program.answers(params, h, questions, {}))
  np.testing.assert_allclose(np.exp(log_p).sum(axis=1), 1, rtol=1e-5)
  picked = log_p[np.arange(8), batch['tokens'][:, -1]]
  assert float(sums.nll_sum) == pytest.approx(-picked.sum(), rel=1e-5)
  others = asked['labels'].copy()
  others[:, :-1] = 7
  same, _ = gradient(others)
  for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(same), strict=True):
    np.testing.assert_array_equal(x, y)
  others[0, -1] = 7
  changed, _ = gradient(others)
  head = [np.asarray(g['head']['kernel']) for g in (grads, changed)]
  assert np.abs(head[0] - head[1]).max() > 0


TIMED = ('perf/tokens_per_second', 'perf/model_flops_per_second')


def lines(cell):
  rows = metric_writer.read_metrics(cell / 'metrics.jsonl')
  return [{k: v for k, v in r.items() if k not in TIMED} for r in rows]


@pytest.fixture(scope='module')
def sweep_folder(tmp_path_factory):
  """A sweep of two cells as one population."""

  def add_all(add):
    add({'init.gamma': 0.5}, seed=0)
    add({'init.gamma': 1.0}, seed=1)

  cells = sweep.expand(CONFIG, add_all)
  workdir = tmp_path_factory.mktemp('anchor')
  groups = grouping.Populations(workdir)
  assert sweep.run_sweep(cells, workdir, trainer.train, '', groups) == 0
  assert (workdir / grouping.FOLDER).exists()
  return workdir, cells


def test_a_population_is_its_single_runs_and_a_resumed_one(
  sweep_folder, tmp_path
):
  workdir, cells = sweep_folder
  for cell in cells:
    alone = tmp_path / cell.id
    got = trainer.train(cell.config, alone)
    want = json.loads((workdir / cell.id / 'results.json').read_text())
    assert got['metrics'] == want['metrics']
    assert lines(alone) == lines(workdir / cell.id)
  shutil.rmtree(alone / 'checkpoints/3')  # as a kill would leave it
  again = trainer.train(cells[-1].config, alone)
  assert again['timing']['steps_timed'] == 1
  assert again['metrics'] == want['metrics']
  assert lines(alone) == lines(workdir / cells[-1].id)
  evaluated = trainer.evaluate_cell(cells[-1].config, alone)
  assert evaluated['metrics'] == {
    k: v for k, v in want['metrics'].items() if k.startswith('heldout/')
  }


def test_results_say_what_was_asked_and_nothing_of_bytes(sweep_folder):
  workdir, _ = sweep_folder
  rows = results.collect(workdir)
  numbers = rows[0].numbers
  assert numbers['heldout/tokens'] == 4 * 14
  assert numbers['train/tokens_seen'] == 3 * 8
  shares = [
    numbers[f'heldout/mirror/{k}']
    for k in ('compositional', 'symmetric', 'other')
  ]
  assert sum(shares) == pytest.approx(1)
  assert not any('byte' in name for name in numbers)
  table = report_tables.arms(findings.find(rows))
  assert list(table.header) == ['arm', 'held-out loss', 'difference', 'seeds']
  assert {len(line) for line in table.body} == {4}
  line = metric_writer.read_metrics(rows[0].curve)[-1]
  assert 'sink/max_activation/0' in line  # measured on rows of the task
  rate = line['perf/model_flops_per_second'] / line['perf/tokens_per_second']
  assert rate == pytest.approx(flops.flops_per_token(CONFIG.model, 9))

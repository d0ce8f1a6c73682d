"""Tasks: rows of published sets, answers, intervals, choices, whole runs."""

import contextlib
import dataclasses
import gzip
import json
from fractions import Fraction

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds
from scipy import stats

from gamma_jax import (
  checkpoint,
  configure,
  metric_writer,
  program,
  streams,
  trained,
  trainer,
)
from gamma_jax.config import (
  CheckpointConfig,
  Config,
  DataConfig,
  EvalConfig,
  ModelConfig,
  TrainConfig,
)
from gamma_jax.data import tokenizer
from gamma_jax.errors import ConfigError
from gamma_jax.tasks import (
  answers,
  choice,
  generation,
  items,
  rates,
  runner,
  synthetic,
)
from gamma_jax.tasks.items import Choice, Problem

BYTES = tokenizer.load_tokenizer('bytes')

# --- rows


@pytest.mark.parametrize(
  ('kind', 'row', 'want'),
  [
    (
      'hellaswag',
      {
        'activity_label': 'Baking',
        'ctx': 'A man [header] How to bake [title] Mix it.  He',
        'endings': ['eats.', '[step] sings.'],
        'label': '1',
      },
      Choice('Baking: A man How to bake. Mix it. He', (' eats.', ' sings.'), 1),
    ),
    (
      'hellaswag',  # as TFDS names it
      {
        'activity_label': 'X',
        'context': 'y',
        'endings': ['a', 'b'],
        'label': 0,
      },
      Choice('X: y', (' a', ' b'), 0),
    ),
    (
      'piqa',
      {'goal': 'open', 'sol1': 'pull', 'sol2': 'eat', 'label': 0},
      Choice('Question: open\nAnswer:', (' pull', ' eat'), 0),
    ),
    (
      'arc',
      {
        'question': 'why?',
        'choices': {'text': ['x', 'y', 'z'], 'label': ['A', 'B', 'C']},
        'answerKey': 'C',
      },
      Choice('Question: why?\nAnswer:', (' x', ' y', ' z'), 2),
    ),
    (
      'arc',
      {
        'question': {
          'stem': 'why?',
          'choices': [
            {'text': 'x', 'label': '1'},
            {'text': 'y', 'label': '2'},
          ],
        },
        'answerKey': '2',
      },
      Choice('Question: why?\nAnswer:', (' x', ' y'), 1),
    ),
    (
      'ceval',
      {
        'question': '几',
        'A': '一',
        'B': '二',
        'C': '三',
        'D': '四',
        'answer': 'B',
      },
      Choice(
        '题目：几\nA. 一\nB. 二\nC. 三\nD. 四\n答案：',
        (' A', ' B', ' C', ' D'),
        1,
      ),
    ),
    (
      'gsm8k',
      {'question': 'q?', 'answer': '2*3=<<2*3=6>>6 so\n#### 1,006'},
      Problem(
        'Question: q?\nAnswer:',
        '1,006',
        ' 2*3=6 so\n#### 1,006',
        ('\nQuestion:',),
      ),
    ),
    (
      'math500',
      {'problem': 'p', 'solution': 's', 'answer': '\\frac{1}{2}'},
      Problem('Problem: p\nSolution:', '\\frac{1}{2}', ' s', ('\nProblem:',)),
    ),
    (
      'mcq',
      {'prompt': 'p', 'choices': [' a', ' b'], 'answer': 1},
      Choice('p', (' a', ' b'), 1),
    ),
  ],
)
def test_rows_become_items(kind, row, want):
  assert items.FORMATS[kind](row) == want


def test_cmmlu_has_capital_fields():
  row = {'Question': 'q', **dict(zip('ABCD', 'wxyz')), 'Answer': 'D'}
  assert items.cmmlu(row) == items.ceval(
    {'question': 'q', **dict(zip('ABCD', 'wxyz')), 'answer': 'D'}
  )


MCQ = [{'prompt': 'p', 'choices': ['a', 'b'], 'answer': i} for i in (0, 1, 1)]


def test_files_are_read_in_order(tmp_path):
  text = '\n'.join(map(json.dumps, MCQ)) + '\n\n'
  (tmp_path / 'a.jsonl').write_text(text)
  (tmp_path / 'a.jsonl.gz').write_bytes(gzip.compress(text.encode()))
  for name in ('a.jsonl', 'a.jsonl.gz'):
    path = str(tmp_path / name)
    assert [i.answer for i in items.read('mcq', path, 0)] == [0, 1, 1]
    assert len(items.read('mcq', path, 2)) == 2


def test_parquet_is_read(tmp_path):
  pyarrow = pytest.importorskip('pyarrow')
  parquet = pytest.importorskip('pyarrow.parquet')
  path = tmp_path / 'a.parquet'
  parquet.write_table(pyarrow.Table.from_pylist(MCQ), path)
  assert items.read('mcq', str(path), 0) == [items.mcq(row) for row in MCQ]


@pytest.mark.filterwarnings('ignore')  # those of datasets are not ours
def test_a_set_of_the_hub_is_read(tmp_path):
  pytest.importorskip('datasets')
  (tmp_path / 'test.jsonl').write_text('\n'.join(map(json.dumps, MCQ)))
  where = f'hf:{tmp_path},split=test'
  assert items.read('mcq', where, 2) == [items.mcq(row) for row in MCQ[:2]]
  with pytest.raises(ConfigError, match='cannot be read'):
    items.read('mcq', f'hf:{tmp_path},split=validation', 0)
  with pytest.raises(ConfigError, match='needs its split'):
    items.read('mcq', f'hf:{tmp_path}', 0)


class Endings(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  VERSION = tfds.core.Version('1.0.0')

  def _info(self):
    features = tfds.features.FeaturesDict(
      {
        'activity_label': tfds.features.Text(),
        'context': tfds.features.Text(),
        'endings': tfds.features.Sequence(tfds.features.Text()),
        'label': tfds.features.ClassLabel(num_classes=4),
      }
    )
    return tfds.core.DatasetInfo(
      builder=self, features=features, disable_shuffling=True
    )

  def _split_generators(self, dl_manager):
    return {'validation': self._generate_examples()}

  def _generate_examples(self):
    for i in range(3):
      yield (
        i,
        {
          'activity_label': '泡茶',
          'context': f'Pot {i}',
          'endings': ['a', 'b', 'c', 'd'],
          'label': i,
        },
      )


def test_a_set_that_tfds_prepared_is_read(tmp_path):
  tfds.disable_progress_bar()
  Endings(file_format='array_record', data_dir=tmp_path).download_and_prepare()
  where = f'tfds:endings,split=validation,data_dir={tmp_path}'
  (spec,) = items.split(f'hellaswag:{where}')
  assert items.read(*spec, 0) == [
    Choice(f'泡茶: Pot {i}', (' a', ' b', ' c', ' d'), i) for i in range(3)
  ]


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (None, 'there is no file'),
    ('', 'has no item'),
    ('{"prompt": ', ':1 is not JSON'),
    ('{"prompt": "p"}', r"row 1 of .* format mcq \(KeyError: 'choices'\)"),
    ('[1]', 'not of format mcq'),
    ('{"prompt": "p", "choices": ["a", " "], "answer": 0}', 'none of them em'),
    ('{"prompt": "p", "choices": ["a", "b"], "answer": 2}', 'none of the cho'),
    ('{"prompt": "p", "choices": ["a", "b"], "answer": -1}', 'none of the ch'),
  ],
)
def test_a_bad_file_is_one_line(tmp_path, text, message):
  path = tmp_path / 'a.jsonl'
  if text is not None:
    path.write_text(text)
  with pytest.raises(ConfigError, match=message) as error:
    items.read('mcq', str(path), 0)
  assert '\n' not in str(error.value)


def test_task_names():
  assert items.split('') == []
  assert items.split('synth_arith, gsm8k:/a:b.jsonl') == [
    ('synth_arith', ''),
    ('gsm8k', '/a:b.jsonl'),
  ]
  # Options of a set, and commas in the names of cells, belong to their task.
  assert items.split('gsm8k:hf:a/b,split=test,mcq:/gamma=1,seed=0/x') == [
    ('gsm8k', 'hf:a/b,split=test'),
    ('mcq', '/gamma=1,seed=0/x'),
  ]
  for bad in ('gsm8k', 'synth_arith:x', 'hellaswagg:x', 'gym', 'x'):
    with pytest.raises(ConfigError, match='eval.tasks: .* is not synth_cloze'):
      items.split(bad)
  with pytest.raises(ConfigError, match='twice'):
    items.split('synth_arith,synth_arith')


# --- answers and rates


@pytest.mark.parametrize(
  ('text', 'want'),
  [
    ('so 3 + 4 = 7\n#### 7', 7),
    ('#### 1,234.50', Fraction('1234.5')),
    ('#### $-5 and not 6', -5),
    ('#### -$5', -5),
    ('The answer is 18.', 18),
    ('it costs $2,000 in 1999-2003', 2003),
    ('.5', Fraction(1, 2)),
    ('none', None),
    ('7 #### none', None),
  ],
)
def test_final_number(text, want):
  assert answers.final_number(text) == want


def test_numbers_are_compared_as_numbers():
  assert answers.number('#### 70,000.00', '70000')
  assert not answers.number('#### 7', '70')
  assert not answers.number('none', 'none')


def test_boxed_matches_braces():
  assert answers.boxed(r'\boxed{1} then \boxed{\frac{1}{2}}.') == r'\frac{1}{2}'
  assert answers.boxed('1/2') is None
  assert answers.boxed(r'\boxed{\frac{1}{2}') is None


def test_an_answer_that_is_the_same_string_needs_no_mathematics():
  assert answers.expression(r'so \boxed{ \frac{1}{2} }', r'\frac{1}{2}')
  assert not answers.expression('so 3', '3')


@pytest.mark.slow
def test_answers_are_compared_as_mathematics():
  pytest.importorskip('math_verify')
  assert answers.expression(r'\boxed{0.5}', r'\frac{1}{2}')
  assert answers.expression(r'\boxed{(x+1)^2}', 'x^2+2x+1')
  assert not answers.expression(r'\boxed{0.4}', r'\frac{1}{2}')


@pytest.mark.parametrize(('right', 'n'), [(0, 5), (3, 7), (180, 200), (9, 9)])
def test_wilson_is_scipys(right, n):
  want = stats.binomtest(right, n).proportion_ci(0.95, method='wilson')
  assert rates.wilson(right, n) == pytest.approx(tuple(want), abs=1e-9)
  low, high = rates.wilson(right, n)
  assert 0 <= low <= right / n <= high <= 1


# --- items from held-out text

DOCUMENTS = [
  ('en', f'Chapter {i} tells what they did there for long, all of the {word}.')
  for i, word in enumerate('kings queens ships birds trees'.split())
] + [
  ('zh', text * 3) for text in ('床前明月光疑', '春眠不觉晓处', '白日依山尽黄')
]


def test_cloze_has_the_true_continuation_once_and_is_the_same_again():
  found = synthetic.make('synth_cloze', DOCUMENTS, 0)
  assert len(found) == 5  # three Chinese documents cannot give four choices
  for item, (_, text) in zip(found, DOCUMENTS):
    assert text == item.prompt + item.choices[item.answer]
    assert len(set(item.choices)) == 4
  assert synthetic.make('synth_cloze', DOCUMENTS, 2) == found[:2]
  assert len({item.answer for item in found}) > 1
  with pytest.raises(ConfigError, match='too short for synth_cloze'):
    synthetic.make('synth_cloze', DOCUMENTS[:3], 0)


def test_generated_items_have_right_answers():
  sums = synthetic.make('synth_arith', [], 30)
  assert sums == synthetic.make('synth_arith', [], 0)[:30]
  for item in sums:
    for line in item.solved.splitlines():
      left, _, right = line.partition('=')
      assert sum(map(int, left.split('+'))) == int(right)
  (one,) = synthetic.make(
    'synth_copy',
    [('en', 'ab cd ef gh ij kl mn op qr')],
    0,
  )
  assert one.solved == (
    'ab cd ef -> ab cd ef\ngh ij kl -> gh ij kl\nmn op qr -> mn op qr'
  )
  assert answers.exact(one.solution + ' ', one.answer)


@pytest.mark.slow
def test_reasoning_gym_scores_its_own_answers():
  pytest.importorskip('reasoning_gym')
  found, check = synthetic.gym('chain_sum', 3)
  assert [check(p.solution, p.answer) for p in found] == [True] * 3
  assert not check('nothing', found[0].answer)
  with pytest.raises(ConfigError, match='gym:no_such'):
    synthetic.gym('no_such', 3)


# --- choices, by a model known by heart: NLL depends on what a position sees


def seen_nll(batch):
  """NLL of a label: a function of all tokens of its own document before it."""
  out = np.zeros(batch['inputs'].shape)
  for b, row in enumerate(batch['inputs']):
    for t in range(len(row)):
      own = batch['segment_ids'][b, : t + 1] == batch['segment_ids'][b, t]
      if not batch['segment_ids'][b, t]:
        continue
      seen = row[: t + 1][own]
      assert batch['positions'][b, t] == len(seen) - 1
      mixed = int(np.dot(seen, np.arange(1, len(seen) + 1)))
      out[b, t] = (mixed * 7 + int(batch['labels'][b, t]) * 13) % 97
  return np.where(batch['mask'], out / 97, 0)


def by_hand(prompt, text, room):
  """Log-probability of `text` after [eot] prompt, its start cut to fit."""
  prompt, text = list(prompt.encode()), list(text.encode())
  keep = max(room - len(text), 0)
  ids = [BYTES.eot_id, *prompt[len(prompt) - min(keep, len(prompt)) :], *text]
  total = 0.0
  for t in range(len(ids) - 1 - len(text), len(ids) - 1):
    mixed = sum(i * n for n, i in enumerate(ids[: t + 1], 1))
    total -= (mixed * 7 + ids[t + 1] * 13) % 97 / 97
  return total


QUESTIONS = [
  Choice('short', (' a', ' much longer'), 1),
  Choice('a prompt that is longer than a row', (' x', ' yy', ' zzz'), 2),
  Choice('', ('no prompt', 'at all'), 0),
  Choice('space ', ('goes', 'along'), 0),
  Choice('中', ('文', '字字'), 1),
  Choice('p', ('one choice longer than the row', 'b'), 1),
]


def scored(questions, batch_size=2, seq_len=16):
  return choice.score(
    questions, BYTES, seen_nll, seq_len=seq_len, batch_size=batch_size
  )


@pytest.mark.parametrize('seq_len', [16, 64])
def test_choices_score_as_by_hand_whatever_the_batch_and_the_order(seq_len):
  room = max(seq_len, len('one choice longer than the row'))
  want = [
    [
      by_hand(q.prompt.rstrip(' '), ' ' * q.prompt.endswith(' ') + c, room)
      for c in q.choices
    ]
    for q in QUESTIONS
  ]
  for batch_size in (1, 2, 5):
    for order in (slice(None), slice(None, None, -1)):
      found = scored(QUESTIONS[order], batch_size, seq_len)
      for got, expected in zip(found[order], want, strict=True):
        np.testing.assert_allclose(got.logprob, expected, atol=1e-12)
  cut = [s.cut for s in scored(QUESTIONS, seq_len=seq_len)]
  assert cut == [False, room < 36, False, False, False, room == 30]


def test_accuracy_by_probability_and_per_byte():
  questions = [Choice('p', (' a', ' 中文'), 1), Choice('p', ('b', 'cd'), 0)]
  scores = [
    choice.Score(np.array([-1.0, -3.0]), np.array([1, 6]), False),
    choice.Score(np.array([-1.0, -3.0]), np.array([1, 2]), True),
  ]
  found = choice.summarize(questions, scores)
  assert (found['acc'], found['acc_norm']) == (0.5, 1.0)
  assert (found['items'], found['chance'], found['prompts_cut']) == (2, 0.5, 1)
  assert found['acc_low'] < 0.5 < found['acc_high']
  assert scored(questions)[0].bytes.tolist() == [1, 6]


# --- whole runs


def corpus(folder):
  """Two parts of 30 short documents each."""
  rng = np.random.default_rng(0)
  letters = {'en': list('abcdefgh'), 'zh': list('日月山水风云')}
  for part, alphabet in letters.items():
    lines = []
    for _ in range(30):
      words = [''.join(rng.choice(alphabet, n)) for n in rng.integers(1, 8, 30)]
      lines.append(json.dumps({'text': ' '.join(words)}))
    (folder / f'{part}.jsonl').write_text('\n'.join(lines))
  return f'jsonl:{folder}/*.jsonl'


@pytest.fixture(scope='module')
def cell(tmp_path_factory):
  """(config, folder) of a cell with a checkpoint, drawn without a compile."""
  folder = tmp_path_factory.mktemp('cell')
  data = DataConfig(
    source=corpus(folder),
    tokenizer='bytes',
    dir=str(folder / 'data'),
    heldout_percent=50,
  )
  config = Config(
    model=ModelConfig(D=16, F=32, L=1, N=2, K=1, H=8, V=257),
    train=TrainConfig(batch_size=4, seq_len=64, loss_chunk=256),
    data=data,
    eval=EvalConfig(documents=8, batch_size=4),
  )
  one = program.build(configure.program_key(config), (jax.devices()[0],))
  rng = np.random.default_rng(0)

  def draw(x):
    value = rng.normal(0, 0.3, x.shape).astype(x.dtype)
    return jax.device_put(value, x.sharding)

  state = jax.tree.map(draw, one.abstract_state)
  saver = checkpoint.Checkpointer(
    folder / 'cell/checkpoints', CheckpointConfig()
  )
  with contextlib.closing(saver):
    saver.save(2, state, streams.Streams([config]), {})
  return config, folder / 'cell'


def evaluated(cell, **options):
  config, folder = cell
  options = dataclasses.replace(config.eval, **options)
  return trainer.evaluate_cell(
    dataclasses.replace(config, eval=options), folder
  )


TASKS = dict(
  tasks='synth_cloze,synth_arith', max_items=6, new_tokens=8, shots=1
)


def test_results_do_not_depend_on_batch_size_or_accumulation(cell):
  one = evaluated(cell, **TASKS)
  config, folder = cell
  lines = json.loads((folder / 'eval_items.json').read_text())
  train = dataclasses.replace(config.train, accumulation=2)
  other = evaluated(
    (dataclasses.replace(config, train=train), folder), **TASKS, batch_size=8
  )
  again = json.loads((folder / 'eval_items.json').read_text())
  assert lines['synth_arith'] == again['synth_arith']
  for a, b in zip(lines['synth_cloze'], again['synth_cloze'], strict=True):
    np.testing.assert_allclose(a['logprob'], b['logprob'], rtol=1e-5)
  assert one['tasks'] == other['tasks']
  assert one['metrics'].keys() == other['metrics'].keys()
  for name, value in one['metrics'].items():
    assert other['metrics'][name] == pytest.approx(value, rel=1e-5), name
    if 'tokens' in name or 'documents' in name:
      assert other['metrics'][name] == value


def test_every_held_out_loss_has_a_stderr_and_bits_per_byte(cell):
  metrics = evaluated(cell)['metrics']
  for suffix in ('', '/en', '/zh'):
    assert metrics[f'heldout/loss_stderr{suffix}'] > 0
    assert metrics[f'heldout/bits_per_byte{suffix}'] > 0
  assert metrics['heldout/documents'] == 8


def test_tasks_in_training_give_what_eval_mode_gives(cell, tmp_path):
  """For every member of a group, at each evaluation and at the end."""
  config, _ = cell
  config = dataclasses.replace(
    config,
    train=dataclasses.replace(config.train, steps=4),
    opt=dataclasses.replace(config.opt, warmup_steps=1, lr=0.05),
    eval=dataclasses.replace(config.eval, every=2, **TASKS),
  )
  pair = [dataclasses.replace(config, seed=seed) for seed in (0, 1)]
  cells = [tmp_path / f'seed={c.seed}' for c in pair]
  group = tmp_path / trained.POPULATIONS / 'pair'
  trained.write_members(group, [folder.name for folder in cells])
  trainer.train_together(pair, cells, group, 'map')
  scores = []
  for config, folder in zip(pair, cells, strict=True):
    found = trainer.evaluate_cell(config, folder)
    want = runner.rates(found['tasks'])
    assert len(want) == 9  # acc, acc_norm and pass, each with its two ends
    got = json.loads((folder / 'results.json').read_text())['metrics']
    assert {k: got[k] for k in want} == want
    logged = metric_writer.read_metrics(folder / 'metrics.jsonl')
    assert [r['step'] for r in logged if want.keys() <= r.keys()] == [2]
    lines = json.loads((folder / 'eval_items.json').read_text())
    scores.append(lines['synth_cloze'])
  assert scores[0] != scores[1]  # each member's own weights


def test_eval_writes_counts_and_intervals(cell):
  found = evaluated(cell, **TASKS)
  assert json.loads((cell[1] / 'eval.json').read_text()) == found
  cloze, sums = (found['tasks'][name] for name in TASKS['tasks'].split(','))
  assert cloze['items'] == sums['items'] == 6
  assert cloze['chance'] == 0.25
  for result, name in ((cloze, 'acc'), (cloze, 'acc_norm'), (sums, 'pass')):
    low, high = result[f'{name}_low'], result[f'{name}_high']
    assert 0 <= low <= result[name] <= high <= 1
  shown = runner.table({'gamma=1.0': found})
  assert f'acc_norm (chance 0.25)  {cloze["acc_norm"]:.3f}  ' in shown
  assert 'heldout/bits_per_byte/zh' in shown


def test_bad_tasks_fail_before_the_model_is_built(cell, monkeypatch):
  monkeypatch.setattr(trainer, '_engine', None)
  for tasks, options, message in [
    ('gsm8k:/nowhere', {}, 'no file /nowhere'),
    ('synth_arith', {'max_items': 0, 'shots': 200}, 'leaves none of the 200'),
  ]:
    with pytest.raises(ConfigError, match=message):
      evaluated(cell, tasks=tasks, **options)


class Scripted:
  """A program that writes given bytes, a chunk at a time."""

  def __init__(self, texts):
    self.texts, self.prompts, self.at = texts, [], 0

  def put_batch(self, batch):
    return batch

  def prefill(self, params, h, moe_state, given, slots):
    self.prompts += [t[:n].tolist() for t, n in zip(*given.values()) if n]
    self.at = 0
    return Standing(np.zeros(len(given['lengths']), bool))

  def extend(self, params, h, moe_state, decoding, choice, steps):
    out = np.full((len(decoding.done), steps), BYTES.eot_id)
    for row, text in zip(out, self.texts):
      part = list(text[self.at : self.at + steps])
      row[: len(part)] = part
    self.at += steps
    return decoding, out


@dataclasses.dataclass
class Standing:
  done: np.ndarray

  def _replace(self, done):
    return Standing(done)


def test_texts_end_at_a_stop_string_at_eot_or_at_the_limit():
  config = Config(
    train=TrainConfig(seq_len=100),
    eval=EvalConfig(batch_size=4, new_tokens=40),
  )
  long = b'x' * 31 + b'\n\nQuestion' + b'y' * 99  # the stop spans two chunks
  scripted = Scripted([long, b'done', b'z' * 99])
  writer = generation.Writer(config, scripted, (None, None), BYTES)
  problems = [
    Problem('p' * 99, '', '', ('never', '\n\nQ')),
    Problem('q ', '', '', ()),
    Problem('r', '', '', ('\n',)),
  ]
  found = writer.write(problems, 'any')
  assert [w.text for w in found] == ['x' * 31, 'done', 'z' * 40]
  assert [w.ended for w in found] == [True, True, False]
  assert [w.cut for w in found] == [True, False, False]
  eot = BYTES.eot_id
  assert scripted.prompts == [[eot, *b'p' * 59], [eot, *b'q'], [eot, *b'r']]

"""The real harness on a local task. Run by `make test-export`."""

import json
import pathlib
import sys

import numpy as np
import pytest

from gamma_jax import lm_eval, score, trained
from gamma_jax.data import tokenizer as tokenizer_lib
from gamma_jax.errors import ConfigError
from tests.score_test import CONFIG, MODEL, drawn, evaluated

pytestmark = pytest.mark.export
EOT = 256
TEXTS = ['Kurz und gut.', 'A text of more than forty bytes, ' * 4, 'x']
TASK = """
task: local_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: {text}
doc_to_target: {target}
target_delimiter: ""
metric_list: [{{metric: {metric}}}]
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4, do_sample: false}}
"""


@pytest.fixture(scope='module')
def model():
  return trained.Trained(pathlib.Path('cell'), CONFIG, 1, drawn(MODEL), {})


@pytest.fixture
def harness(model, monkeypatch):
  """Builds our class as the harness would, on a model without a folder."""
  pytest.importorskip('lm_eval')
  from gamma_jax import lm_eval_model

  monkeypatch.setattr(trained, 'load', lambda path: model)
  return lm_eval_model.GammaLM


def total(model, text):
  """Log-likelihood in windows of T; the last one has all the context it can."""
  ids, T = [EOT, *text.encode()], CONFIG.train.seq_len
  answer, done = 0.0, 1
  while done < len(ids):
    end = min(done + T, len(ids))
    (nll,) = evaluated(model, [ids[max(end - T - 1, 0) : end]], T)
    answer -= nll[-(end - done) :].sum(dtype=float)
    done = end
  return answer


# The harness forks to describe the machine in its results.
@pytest.mark.filterwarnings('ignore:os.fork')
def test_a_local_task_gives_our_log_likelihoods(
  model, harness, tmp_path, monkeypatch, capsys
):
  docs = [{'text': t, 'q': t[:9], 'a': t[9:30] or 'y'} for t in TEXTS]
  data = tmp_path / 'docs.jsonl'
  data.write_text('\n'.join(map(json.dumps, docs)))
  for kind, text, target, metric in (
    ('loglikelihood_rolling', '""', '"{{text}}"', 'bits_per_byte'),
    ('loglikelihood', '"{{q}}"', '"{{a}}"', 'perplexity'),
    ('generate_until', '"{{q}}"', '"{{a}}"', 'exact_match'),
  ):
    (tmp_path / f'{kind}.yaml').write_text(
      TASK.format(data=data, kind=kind, text=text, target=target, metric=metric)
    )
  flags = '--model gamma_jax --model_args path=cell --batch_size 4 --tasks'
  flags = [*flags.split(), 'local_loglikelihood_rolling,local_loglikelihood']
  flags[-1] += ',local_generate_until'
  flags += ['--include_path', str(tmp_path), '--log_samples']
  flags += ['--output_path', str(tmp_path / 'out')]
  monkeypatch.setattr(sys, 'argv', ['lm_eval', *flags])
  monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'cache'))
  assert lm_eval.main() == 0
  assert 'local_loglikelihood_rolling' in capsys.readouterr().out

  def answers(kind):
    (path,) = (tmp_path / 'out').rglob(f'samples_local_{kind}_2*.jsonl')
    rows = sorted(
      map(json.loads, path.read_text().splitlines()),
      key=lambda row: row['doc_id'],
    )
    return [row['resps'][0][0] for row in rows]

  rolling = [float(np.ravel(x)[0]) for x in answers('loglikelihood_rolling')]
  want = [total(model, text) for text in TEXTS]
  np.testing.assert_allclose(rolling, want, rtol=1e-5)
  for doc, answer in zip(docs, answers('loglikelihood'), strict=True):
    row = [EOT, *(doc['q'] + doc['a']).encode()]
    got = float(np.ravel(answer)[0])
    (nll,) = evaluated(model, [row], T=40)
    # The continuation takes the space that the context ends with.
    n = len(row) - 1 - len(doc['q'].rstrip().encode())
    want = -nll[-n:].sum(dtype=float)
    assert got == pytest.approx(want, rel=1e-5)
  scorer = score.Scorer(model, 1)
  for doc, answer in zip(docs, answers('generate_until'), strict=True):
    prompt = [EOT, *doc['q'].encode()]
    ids = scorer.greedy(prompt, 4, lambda ids: ids[-1] in (EOT, 10))
    want = (
      tokenizer_lib.load_tokenizer('bytes')
      .decode(ids)
      .decode('utf-8', 'replace')
    )
    assert answer == want.split('\n')[0]


class Request:
  def __init__(self, *args):
    self.args = args


def test_a_long_context_loses_its_beginning(model, harness):
  lm = harness('cell', batch_size='2')
  long, end = 'abc ' * 30, ' defg'
  ((got, greedy),) = lm.loglikelihood([Request(long, end)], disable_tqdm=True)
  row = list((long + end).encode()[-41:])
  (nll,) = evaluated(model, [row], T=40)
  # The harness gives the continuation the space that the context ends with.
  assert got == pytest.approx(-nll[-6:].sum(dtype=float), rel=1e-5)
  assert greedy is False


def test_what_cannot_be_answered_is_refused(harness):
  lm = harness('cell')
  for options, message in (
    ({'do_sample': True}, 'greedy'),
    ({'max_gen_toks': 40}, 'no room'),
  ):
    with pytest.raises(ConfigError, match=message):
      lm.generate_until([Request('a', options)])
  with pytest.raises(ConfigError, match='longer than max_length=40'):
    lm.loglikelihood([Request('a', 'b' * 41)], disable_tqdm=True)
  with pytest.raises(ConfigError, match='batch_size=auto'):
    harness('cell', batch_size='auto')


def test_a_bad_path_is_one_line(tmp_path, monkeypatch, capsys):
  pytest.importorskip('lm_eval')
  flags = ['--model', 'gamma_jax', '--model_args', f'path={tmp_path}/none']
  monkeypatch.setattr(sys, 'argv', ['lm_eval', *flags, '--tasks', 'arc_easy'])
  assert lm_eval.main() == 2
  assert 'no config.json' in capsys.readouterr().err

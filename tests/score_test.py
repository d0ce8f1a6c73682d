"""Scores are those of the evaluation; continuations are the most likely."""

import dataclasses
import functools
import pathlib

import jax
import numpy as np
import pytest

from gamma_jax import score, train_step, trained
from gamma_jax.config import Config, DataConfig, ModelConfig, TrainConfig
from tests.hf_layout_test import drawn

MODEL = ModelConfig(D=16, F=24, L=1, N=2, K=1, H=8, V=257)
CONFIG = Config(
  model=MODEL,
  train=TrainConfig(seq_len=40, loss_chunk=64),
  data=DataConfig(tokenizer='bytes'),
)


@pytest.fixture(scope='module')
def model():
  return trained.Trained(pathlib.Path('cell'), CONFIG, 1, drawn(MODEL), {})


@pytest.fixture(scope='module')
def scorer(model):
  return score.Scorer(model, batch_size=2)


def evaluated(model, rows, T=32):
  """NLL of ids 1, 2, ... of all rows, as the trainer's evaluation gives it."""
  tokens = np.zeros((len(rows), T + 1), np.int32)
  mask = np.zeros((len(rows), T), bool)
  for b, row in enumerate(rows):
    tokens[b, : len(row)], mask[b, : len(row) - 1] = row, True
  batch = {
    'inputs': tokens[:, :-1],
    'labels': tokens[:, 1:],
    'segment_ids': mask.astype(np.int32),
    'positions': np.broadcast_to(np.arange(T, dtype=np.int32), mask.shape),
    'mask': mask,
  }
  step = jax.jit(functools.partial(train_step.eval_step, model.config))
  nll = step(model.params, train_step.hyper(model.config), batch, {})
  return [np.asarray(x)[m] for x, m in zip(nll, mask, strict=True)]


def test_scores_are_those_of_the_evaluation_in_any_company(model, scorer):
  rng = np.random.default_rng(0)
  rows = [rng.integers(0, 257, n).tolist() for n in (30, 2, 17, 9, 3)]
  got = scorer.score(rows)
  want = evaluated(model, rows)
  for row, (nll, hit), reference in zip(rows, got, want, strict=True):
    assert nll.shape == hit.shape == (len(row) - 1,)
    np.testing.assert_allclose(nll, reference, atol=1e-5)
  (nll, hit), _ = scorer.score([rows[0], rows[3]])
  np.testing.assert_allclose(nll, got[0][0], atol=1e-5)


def test_greedy_takes_the_most_likely_id_each_time(model, scorer):
  prompt = [256, 72, 101]
  new = scorer.greedy(prompt, 5, lambda ids: False)
  assert len(new) == 5
  (nll, hit), (_, other) = scorer.score(
    [[*prompt, *new], [*prompt, (new[0] + 1) % 257]]
  )
  assert hit[2:].all() and not other[2]
  every = [[*prompt, i] for i in range(257)]
  best = np.argmin([nll[-1] for nll, _ in scorer.score(every)])
  assert new[0] == best
  stopped = scorer.greedy(prompt, 5, lambda ids: ids[-1] == new[1])
  assert stopped == new[: new.index(new[1]) + 1]


def test_balancing_biases_count(model):
  moe = dataclasses.replace(
    MODEL.moe, experts=2, top_k=1, bias_rate=0.1, dispatch='dense'
  )
  config = dataclasses.replace(
    CONFIG, model=dataclasses.replace(MODEL, moe=moe)
  )
  made = dataclasses.replace(
    model,
    config=config,
    params=drawn(config.model),
    moe_state={'blocks': {'moe': {'bias': np.array([[9, 0]], np.float32)}}},
  )
  scorer, row = score.Scorer(made, 1), [256, 1, 2, 3]
  ((before, _),) = scorer.score([row])
  scorer._variables['moe_state']['blocks']['moe']['bias'] *= -1
  ((after, _),) = scorer.score([row])
  assert np.abs(before - after).max() > 1e-3


@pytest.mark.parametrize(
  ('length', 'padded'), [(1, 32), (32, 32), (33, 64), (64, 64), (65, 128)]
)
def test_few_lengths_are_compiled(length, padded):
  assert score._padded(length) == padded

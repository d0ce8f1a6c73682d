"""Paired runs must have seen the same batches and the same draws."""

import numpy as np
import pytest

from gamma_jax import metric_writer
from gamma_jax.analysis import common_random_numbers as crn


def draws(seed, gamma, dtype=np.float32, **shapes):
  """Unit normals scaled by gamma, each a function of its name and the seed."""
  shapes = shapes or {'embed': (16, 8), 'mlp': (2, 8, 8)}
  return {
    name: (
      np.random.default_rng([seed, *name.encode()]).normal(size=shape)
      * shape[-1] ** -gamma
    ).astype(dtype)
    for name, shape in shapes.items()
  }


def run(id, seed=0, gamma=0.5, batches=(7, 8, 9), **kwargs):
  init = crn.init_fingerprint(draws(seed, gamma, **kwargs))
  return crn.Run(id, seed, dict(enumerate(batches, start=1)), init)


def test_all_that_agrees_passes():
  runs = [
    run('a'),
    run('b', gamma=1.25),
    run('half', gamma=1.0, dtype=np.float16),
    run('short', batches=(7, 8)),
    run('gate', embed=(16, 8), gate=(8, 8)),
    run('wide', embed=(16, 8), mlp=(2, 8, 32)),
    run('other seed', seed=1, batches=(1, 2, 3)),
  ]
  assert crn.check_common_random_numbers(runs) == crn.Check([], [])


def test_every_pair_that_differs_is_named():
  got = crn.check_common_random_numbers(
    [run('a'), run('b', batches=(7, 0, 0)), run('c', gamma=1.0)]
  )
  assert not got.unchecked
  words = 'batches differ at 2 of 3 steps, first at step 2'
  assert got.mismatches == [
    crn.Mismatch('a', 'b', words),
    crn.Mismatch('b', 'c', words),
  ]


def test_other_draws_are_found():
  other = crn.Run('b', 0, {1: 7}, run('b', seed=3).init)
  got = crn.check_common_random_numbers([run('a'), other])
  assert [m.words for m in got.mismatches] == [
    'initial draws differ at 2 of 2 parameters, first at parameter '
    'embed [16, 8]'
  ]
  # One matrix drawn anew is enough.
  changed = draws(0, 1.0)
  changed['mlp'][1, 3, 3] *= -1
  init = crn.init_fingerprint(changed)
  got = crn.check_common_random_numbers(
    [run('a'), crn.Run('b', 0, {1: 7}, init)]
  )
  assert '1 of 2 parameters, first at parameter mlp' in got.mismatches[0].words


def test_what_was_not_recorded_is_no_pass():
  got = crn.check_common_random_numbers(
    [crn.Run('a', 0, {10: 7}), crn.Run('b', 0, {15: 7})]
  )
  assert got == crn.Check(
    [],
    [
      'batches of a and b: no common step',
      'initial draws of a and b: no common parameter',
    ],
  )


@pytest.mark.parametrize('every', [1, 2])
def test_hashes_come_from_the_metrics(tmp_path, every):
  path = tmp_path / 'metrics.jsonl'
  writer = metric_writer.JsonlWriter(path)
  for step in range(every, 7, every):
    writer.write(step, {'train/loss': 1.0, crn.BATCH: 2**32 - step})
  writer.write(9, {'heldout/loss': 1.0})
  writer.close()
  assert crn.batch_hashes(path) == {
    step: 2**32 - step for step in range(every, 7, every)
  }

"""audit: what it accepts, what it finds, and how it refuses bad rules."""

import dataclasses
import math
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze

from gamma_jax import EXEMPT, Axes, audit, gamma_normal
from gamma_jax.audit_tree import Z_LIMIT, z_score
from gamma_jax.tree_rules import AuditError

RULES = {
  'embed/table': Axes((1,), (0,)),
  'layers/*/kernel': Axes((1,), (2,), (0,)),
  '**/scale': EXEMPT,
}


def weights(gamma=1.0, seed=0):
  """An embedding, a stack of three layers with two matrices, two norms."""
  keys = iter(jax.random.split(jax.random.key(seed), 3))
  stack = gamma_normal(gamma, 1, 2, 0)
  return {
    'embed': {'table': gamma_normal(gamma, 1, 0)(next(keys), (256, 64))},
    'layers': {
      'up': {'kernel': stack(next(keys), (3, 64, 128))},
      'down': {'kernel': stack(next(keys), (3, 128, 64))},
      'norm': {'scale': jnp.ones((3, 64))},
    },
    'scale': jnp.ones(64),
  }


def row_of(report, path):
  (row,) = [row for row in report.rows if row.path == path]
  return row


@pytest.mark.parametrize('gamma', [0.5, 1.0, 1.25])
def test_right_weights_pass_and_the_numbers_are_the_rule(gamma):
  report = audit(weights(gamma), RULES, gamma=gamma)
  assert report.ok
  report.raise_if_off()
  verdicts = {row.path: (row.verdict, row.d_in) for row in report.rows}
  assert verdicts == {
    'embed/table': ('ok', 64),
    'layers/up/kernel': ('ok', 64),
    'layers/down/kernel': ('ok', 128),
    'layers/norm/scale': ('exempt', 0),
    'scale': ('exempt', 0),
  }
  row = row_of(report, 'layers/down/kernel')
  value = np.asarray(weights(gamma)['layers']['down']['kernel'], np.float64)
  assert row.asked == pytest.approx(128**-gamma, rel=1e-12)
  assert row.got == pytest.approx(np.sqrt(np.mean(value**2)), rel=1e-6)
  assert row.gamma == pytest.approx(-math.log(row.got) / math.log(128))
  assert row.gamma == pytest.approx(gamma, abs=0.01)
  assert row.z == pytest.approx(
    (row.got / row.asked - 1) * math.sqrt(2 * value.size), abs=0.02
  )


def test_another_gamma_is_off_everywhere():
  report = audit(weights(0.9), RULES, gamma=1.0)
  assert not report.ok
  assert {r.verdict for r in report.rows} == {'off', 'exempt'}
  with pytest.raises(AuditError, match=r'^3 of 5 parameters are off gamma 1;'):
    report.raise_if_off()


def test_one_bad_layer_in_a_stack_is_found():
  params = weights()
  up = params['layers']['up']['kernel']
  # The stack as a whole keeps its std: the other copies make up for it.
  factor = jnp.array([1.1, 0.89, 1.0])[:, None, None]
  params['layers']['up']['kernel'] = up * factor
  report = audit(params, RULES, gamma=1.0)
  row = row_of(report, 'layers/up/kernel')
  assert abs(row.z) < Z_LIMIT
  assert (row.verdict, row.worst_copy) == ('off', (1,))
  assert row.worst_z == pytest.approx(-0.11 * math.sqrt(2 * 64 * 128), abs=2)
  with pytest.raises(AuditError, match=r"'layers/up/kernel'.*copy 1: -1"):
    report.raise_if_off()


def test_many_copies_that_are_each_a_little_off_are_found():
  draw = gamma_normal(1.0, 1, 2, 0)(jax.random.key(0), (64, 64, 64))
  rules = {'w': Axes((1,), (2,), (0,))}
  row = audit({'w': draw * 1.015}, rules, gamma=1.0).rows[0]
  assert abs(row.worst_z) < Z_LIMIT
  assert row.verdict == 'off'
  assert row.z == pytest.approx(0.015 * math.sqrt(2 * draw.size), abs=3)


def test_copies_of_two_batch_axes_keep_their_index():
  init = gamma_normal(1.0, 1, 3, (0, 2))
  value = init(jax.random.key(0), (2, 64, 3, 64))
  bad = value.at[1, :, 2].multiply(2)
  report = audit({'w': bad}, {'w': Axes((1,), (3,), (0, 2))}, gamma=1.0)
  assert report.rows[0].worst_copy == (1, 2)
  # The same with the axes counted from the end and in another order.
  axes = Axes((1,), (-1,), (-2, 0))
  assert audit({'w': bad}, {'w': axes}, gamma=1.0) == report


def test_a_wrong_fan_in_shows_as_another_gamma():
  # lecun_normal of a (D, N, H) query takes N as fan-in.
  query = jax.nn.initializers.lecun_normal()(jax.random.key(0), (512, 8, 64))
  report = audit({'q': query}, {'q': Axes((0,), (1, 2))}, gamma=0.5)
  assert not report.ok
  # It takes 512 * 8: the axis before the last times all axes but two.
  assert report.rows[0].gamma == pytest.approx(0.5 * 4 / 3, abs=0.01)


@pytest.mark.parametrize('bad', [0.0, math.nan, math.inf])
def test_values_that_are_no_draw_are_off(bad):
  params = weights()
  up = params['layers']['up']['kernel']
  params['layers']['up']['kernel'] = up.at[2].set(bad)
  params['embed']['table'] *= 1.1  # off too, but nearer
  report = audit(params, RULES, gamma=1.0)
  row = row_of(report, 'layers/up/kernel')
  assert (row.verdict, row.worst_copy) == ('off', (2,))
  assert 'off' in report.table()
  with pytest.raises(AuditError, match="^2 of .* furthest 'layers/up/kernel'"):
    report.raise_if_off()


def test_a_shifted_mean_is_off_although_the_scatter_is_right():
  params = weights()
  params['embed']['table'] += 0.5 / 64
  assert not audit(params, RULES, gamma=1.0).ok


def test_false_alarms_are_rare_for_one_weight_as_for_many():
  rng = np.random.default_rng(0)
  for n in (1, 3, 30, 3000):
    z = z_score(np.sqrt(rng.chisquare(n, 20000) / n), n)
    # 4.55 % of a normal; fewer for one weight, which is never too small.
    assert 0.02 < np.mean(np.abs(z) > 2) < 0.052
    assert np.max(np.abs(z)) < Z_LIMIT
  # Where it is large, it is the textbook score.
  assert z_score(1.001, 10**6) == pytest.approx(0.001 * 2e6**0.5, rel=1e-3)


def test_half_precision_and_numpy_leaves_are_measured_alike():
  params = weights(0.5)
  half = jax.tree.map(lambda w: np.asarray(w, jnp.bfloat16), params)
  a = row_of(audit(params, RULES, gamma=0.5), 'embed/table')
  b = row_of(audit(half, RULES, gamma=0.5), 'embed/table')
  assert b.got == pytest.approx(a.got, rel=1e-4)


def test_a_large_matrix_is_summed_without_loss():
  # 2^25 terms in one float32 sum would stop at 2^24.
  value = np.full((2**13, 2**12), 2.0**-6, np.float32)
  report = audit({'w': value}, {'w': Axes((1,), (0,))}, gamma=0.5)
  assert report.rows[0].got == pytest.approx(2**-6, rel=1e-7)


def test_every_container_gives_the_same_report():
  plain = weights()
  expected = audit(plain, RULES, gamma=1.0)
  boxed = jax.tree.map(lambda w: nn.Partitioned(w, (None,) * w.ndim), plain)
  state = nnx.State(jax.tree.map(nnx.Param, plain))
  Tree = jax.tree_util.register_dataclass(
    dataclasses.make_dataclass('Tree', ['embed', 'layers', 'scale'])
  )
  for tree in (freeze(plain), boxed, state, Tree(**plain)):
    report = audit(tree, RULES, gamma=1.0)
    assert {r.path: r for r in report.rows} == {
      r.path: r for r in expected.rows
    }


def test_list_positions_are_parts_of_the_path():
  w = weights()['embed']['table']
  report = audit({'h': [{'w': w}, {'w': w}]}, {'h/?/w': Axes(1, 0)}, gamma=1.0)
  assert [row.path for row in report.rows] == ['h/0/w', 'h/1/w']
  assert report.ok


def test_the_table_is_aligned_and_lists_what_escapes():
  report = audit(weights(), RULES, gamma=1.0)
  lines = report.table().splitlines()
  assert lines[0].split() == (
    'parameter shape d_in std asked std got z worst copy gamma verdict'.split()
  )
  at = lines[0].index('verdict')
  assert [line[at:] for line in lines[1:6]] == [
    {'ok': 'ok', 'exempt': 'exempt'}[row.verdict] for row in report.rows
  ]
  assert lines[6] == 'gamma 1, limit |z| <= 5: 3 ok, 0 off, 2 exempt'
  # One scale is a stack of vectors, that is a matrix by its shape.
  assert lines[7] == 'exempt matrices: layers/norm/scale'
  assert report.exempt_matrices == ('layers/norm/scale',)


def test_exempt_patterns_may_be_given_apart():
  rules = {k: v for k, v in RULES.items() if v is not EXEMPT}
  report = audit(weights(), rules, gamma=1.0, exempt=['**/scale'])
  assert report == audit(weights(), RULES, gamma=1.0)


@pytest.mark.parametrize(
  'pattern, path, fits',
  [
    ('a/b', 'a/b', True),
    ('a/*', 'a/b', True),
    ('a/*', 'a/b/c', False),
    ('*', 'a/b', False),
    ('a/**', 'a/b/c', True),
    ('**/c', 'c', True),
    ('**/c', 'a/b/c', True),
    ('a/**/c', 'a/c', True),
    ('a/**/c', 'a/x/y/c', True),
    ('a/**/c', 'a/x/y', False),
    ('h_[0-3]/w', 'h_2/w', True),
    ('A/b', 'a/b', False),
    ('**', '', True),
  ],
)
def test_pattern_semantics(pattern, path, fits):
  tree = {path: jnp.ones(2)}
  if fits:
    audit(tree, {pattern: EXEMPT}, gamma=1.0)
  else:
    with pytest.raises(AuditError, match='covers no parameter'):
      audit(tree, {pattern: EXEMPT}, gamma=1.0)


@pytest.mark.parametrize(
  'change, message',
  [
    ({'layer/x': EXEMPT}, r"'layer/x' covers no parameter; nearest path: 'lay"),
    (
      {'**/scale': None},
      r"no pattern covers 'layers/norm/scale' of shape \(3,",
    ),
    ({'scale': EXEMPT}, r"'scale' is covered .* '\*\*/scale' and 'scale'"),
    (
      {'embed/table': Axes((0,), (1,), (2,))},
      r"'embed/table' on .* out of ran",
    ),
    (
      {'embed/table': Axes((0,), ())},
      r'must name every axis of shape \(256, 64',
    ),
    ({'embed/table': (1, 0)}, r'\(1, 0\): give Axes or EXEMPT'),
  ],
)
def test_rules_that_do_not_fit_are_one_clear_line(change, message):
  rules = {k: v for k, v in {**RULES, **change}.items() if v is not None}
  with pytest.raises(AuditError, match=message) as error:
    audit(weights(), rules, gamma=1.0)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  'leaf, message',
  [
    (jnp.ones((2, 2), jnp.int8), 'is int8, not floating point'),
    (jnp.ones((0, 2)), 'has no elements'),
    ('text', "is <class 'str'>, not floating point"),
    (jax.ShapeDtypeStruct((2, 2), jnp.float32), 'a shape but no values'),
  ],
)
def test_leaves_that_have_no_std(leaf, message):
  with pytest.raises(AuditError, match=message):
    audit({'w': leaf}, {'w': Axes((0,), (1,))}, gamma=1.0)


def test_one_path_twice_is_an_error():
  with pytest.raises(AuditError, match="two parameters have the path 'a/b'"):
    audit({'a': {'b': 1.0}, 'a/b': 1.0}, {'**': EXEMPT}, gamma=1.0)


def test_nothing_to_audit_is_an_error():
  with pytest.raises(AuditError, match='no parameters'):
    audit({}, {}, gamma=1.0)


@pytest.mark.parametrize('gamma', [math.nan, math.inf])
def test_gamma_that_is_no_number_is_an_error(gamma):
  with pytest.raises(AuditError, match='gamma must be finite'):
    audit(weights(), RULES, gamma=gamma)


def test_d_in_of_one_has_no_gamma():
  rules = {'w': Axes((0,), (1,))}
  report = audit({'w': jnp.ones((1, 500))}, rules, gamma=1.0)
  assert report.ok and math.isnan(report.rows[0].gamma)


def test_public_names_import_without_flax_and_jax_comes_late():
  code = (
    'import sys, gamma_jax; early = "jax" in sys.modules;'
    'from gamma_jax import EXEMPT, Axes, audit, gamma_normal, reinit;'
    "heavy = {'flax', 'orbax', 'grain', 'tensorflow_datasets', 'optax'};"
    'print(early, callable(audit), sorted(heavy & set(sys.modules)))'
  )
  out = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert out.stdout.strip() == 'False True []'

"""gamma on models that we did not write: what they draw, what reinit draws."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import portable_examples
from gamma_jax import audit, reinit


@dataclasses.dataclass(frozen=True)
class Example:
  """A package, its builder, and what its own initializers are known to give.

  Attributes:
    package: what it imports.
    named: path -> (d_in, std that the author's initializer gives).
    off_at_half: paths that the audit finds off gamma 0.5.
    matrices: how many parameters are not exempt.
  """

  package: str
  named: dict[str, tuple[int, float]]
  off_at_half: set[str]
  matrices: int


BLOCK = 'blocks.0/recurrent_block'
GATES = {f'{BLOCK}/rg_lru/{gate}_gate/w' for gate in ('a', 'input')}
UPS = {f'blocks.{i}/mlp_block/ffw_up/w' for i in (0, 1)}
GPT2 = {
  'transformer/h/0/attn/c_attn/kernel': (144, 0.02),
  'transformer/h/0/attn/c_proj/kernel': (144, 0.02),
  'transformer/h/0/mlp/c_fc/kernel': (144, 0.02),
  'transformer/h/0/mlp/c_proj/kernel': (4 * 144, 0.02),
}
LAYERS = {path.replace('h/0', f'h/{i}') for path in GPT2 for i in (0, 1)}
TABLES = {f'transformer/{name}/embedding' for name in ('wte', 'wpe')}

EXAMPLES = {
  'griffin': Example(
    'recurrentgemma',
    {
      'embedder/input_embedding': (256, 256**-0.5),
      f'{BLOCK}/linear_x/kernel': (256, 256**-0.5),
      # Its fan-in counts all 4 blocks; each output sums 64 terms.
      **{path: (64, (4 * 64) ** -0.5) for path in GATES},
      # Its fan-in counts gate and value; each output sums 256 terms.
      **{path: (256, (2 * 256) ** -0.5) for path in UPS},
      'blocks.1/mlp_block/ffw_down/kernel': (512, 512**-0.5),
    },
    off_at_half=GATES | UPS | {f'{BLOCK}/conv_1d/w'},
    matrices=15,
  ),
  'gpt2': Example('transformers', GPT2, LAYERS | TABLES, matrices=10),
  'mamba2': Example(
    'mamba2_jax',
    {
      'backbone/embedder/embedding': (128, 128**-0.5),
      'backbone/layers/0/mixer/in_proj/kernel': (128, 128**-0.5),
      'backbone/layers/1/mixer/out_proj/kernel': (256, 256**-0.5),
    },
    off_at_half=set(),
    matrices=7,
  ),
}


@functools.cache
def built(name):
  example = EXAMPLES[name]
  pytest.importorskip(
    example.package, reason=f'{example.package}: pip install -e .[examples]'
  )
  return portable_examples.MODELS[name]()


def audited(params, rules, gamma):
  report = audit(params, rules, gamma=gamma)
  return report, {row.path: row for row in report.rows}


@pytest.mark.parametrize('name', EXAMPLES)
def test_the_audit_tells_what_the_authors_initializers_give(name):
  params, rules = built(name)
  _, rows = audited(params, rules, gamma=0.5)
  for path, (d_in, std) in EXAMPLES[name].named.items():
    assert rows[path].d_in == d_in
    assert rows[path].got == pytest.approx(std, rel=0.02)
    implied = -np.log(std) / np.log(d_in)
    assert rows[path].gamma == pytest.approx(implied, abs=0.005)
  off = {path for path, row in rows.items() if row.verdict == 'off'}
  assert off == EXAMPLES[name].off_at_half


@pytest.mark.parametrize('gamma', [0.7, 1.0])
@pytest.mark.parametrize('name', EXAMPLES)
def test_reinit_gives_the_rule_where_the_model_had_another(name, gamma):
  params, rules = built(name)
  before, old = audited(params, rules, gamma)
  assert not before.ok
  assert sum(r.verdict == 'exempt' for r in before.rows) == (
    len(before.rows) - EXAMPLES[name].matrices
  )
  new = reinit(params, jax.random.key(1), gamma, rules)
  after, rows = audited(new, rules, gamma)
  after.raise_if_off()
  for path, (d_in, _) in EXAMPLES[name].named.items():
    assert rows[path].got == pytest.approx(d_in**-gamma, rel=0.02)
  assert jax.tree.structure(new) == jax.tree.structure(params)
  leaves = zip(jax.tree.leaves(params), jax.tree.leaves(new), strict=True)
  for row, (a, b) in zip(after.rows, leaves, strict=True):
    assert (a is b) == (row.verdict == 'exempt')
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
  assert set(old) == set(rows)


def test_griffin_sums_as_many_terms_as_we_say():
  """Fed with ones, its layers count their own d_in: 64 and 256."""
  pytest.importorskip(
    'recurrentgemma', reason='recurrentgemma: pip install -e .[examples]'
  )
  from recurrentgemma.jax import layers

  gate = layers.BlockDiagonalLinear(width_input=256, num_blocks=4)
  up = layers.Einsum(
    w_shape=(2, 256, 512), b_shape=(2, 1, 1, 512), eqn='...td,cdD->c...tD'
  )
  x = jnp.ones((1, 1, 256))
  for layer, d_in in ((gate, 64), (up, 256)):
    with jax.numpy_rank_promotion('allow'):
      params = layer.init(jax.random.key(0), x)['params']
      weights = {'w': jnp.ones_like(params['w']), 'b': params['b']}
      y = layer.apply({'params': weights}, x)
    np.testing.assert_array_equal(y, d_in)


def test_the_command_prints_both_tables(capsys, monkeypatch):
  model = built('mamba2')
  monkeypatch.setattr(portable_examples, 'MODELS', {'mamba2': lambda: model})
  portable_examples.main()
  before, after = capsys.readouterr().out.split('mamba2: after reinit')
  assert before.startswith('\nmamba2: its own initializers')
  assert 'gamma 0.5, limit |z| <= 5: 7 ok, 0 off, 13 exempt' in before
  assert 'gamma 1, limit |z| <= 5: 7 ok, 0 off, 13 exempt' in after

"""Config files: base says everything, arguments are strict, grids expand."""

import ast
import inspect
import pathlib
import re

import jax
import numpy as np
import pytest
from ml_collections import config_dict

from configs import (
  anchor,
  base,
  bilingual_10m,
  common,
  moe,
  obstacles,
  sizes,
  sweep_1p5b,
  sweep_ladder,
  sweep_tiny,
)
from gamma_jax import configure, flops, init_rules, model, sweep
from gamma_jax.config import Config

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODULES = (
  anchor,
  base,
  bilingual_10m,
  moe,
  obstacles,
  sweep_tiny,
  sweep_ladder,
  sweep_1p5b,
)


def leaves(config, prefix=''):
  """Path -> field type of a ConfigDict."""
  found = {}
  for name in config:
    kind = config.get_type(name)
    if kind is config_dict.ConfigDict and prefix + name != 'data.mixture':
      found |= leaves(config[name], f'{prefix}{name}.')
    else:
      found[prefix + name] = kind
  return found


def expanded(module, arg=None):
  grid = getattr(module, 'sweep', None)
  return sweep.expand(
    configure.resolve(module.get_config(arg)),
    grid and (lambda add: grid(add, arg)),
  )


# configs/base.py


def test_base_equals_the_defaults_of_the_dataclasses():
  assert configure.resolve(base.get_config()) == Config()


def test_base_has_every_field_with_its_type():
  found = leaves(base.get_config())
  assert set(found) == set(configure.fields())
  for path, kind in found.items():
    expected = configure.describe_type(path).split()[1]
    names = {'string': 'str', 'dict': 'ConfigDict'}
    assert kind.__name__ == names.get(expected, expected), path


def test_every_field_of_base_has_a_comment():
  source = inspect.getsource(base).splitlines()
  lines = []
  for node in ast.walk(ast.parse('\n'.join(source))):
    if isinstance(node, ast.Assign) and isinstance(
      node.targets[0], ast.Attribute
    ):
      lines.append(source[node.lineno - 1])
  fields = [line for line in lines if not re.search(r'_?[a-z]+\(\)$', line)]
  assert len(fields) == len(configure.fields())
  assert [f for f in fields if not re.search(r'  # \S', f)] == []


def test_base_cannot_get_a_new_key():
  config = base.get_config().lock()
  with pytest.raises(AttributeError):
    config.init.gama = 1.0


# configs/common.py


@pytest.mark.parametrize(
  ('arg', 'expected'),
  [
    (None, {}),
    ('', {}),
    ('n=3', {'n': 3}),
    ('x=2', {'x': 2.0}),
    ('x=1e-3, n=-1', {'x': 1e-3, 'n': -1}),
    ('flag', {'flag': True}),
    ('flag=true', {'flag': True}),
    ('flag=false', {'flag': False}),
    ('name=a=b', {'name': 'a=b'}),
    ('names=a+b', {'names': ('a', 'b')}),
    ('names=a', {'names': ('a',)}),
  ],
)
def test_arguments(arg, expected):
  defaults = dict(n=1, x=0.5, flag=False, name='z', names=('y',))
  found = common.parse_arg(arg, **defaults)
  assert found == {**defaults, **expected}
  assert {k: type(v) for k, v in found.items()} == {
    k: type(v) for k, v in defaults.items()
  }


@pytest.mark.parametrize(
  ('arg', 'message'),
  [
    ('m=1', "unknown config argument 'm'; there are: n=1, flag=True, name='z'"),
    ('n=1,', "unknown config argument ''"),
    ('n', 'n needs a value: n=1'),
    ('n=', 'n needs a value'),
    ('name', 'name needs a value'),
    ('n=1.5', 'n=1.5 is not of type int'),
    ('n=1,n=2', 'n is given twice'),
    ('flag=1', 'flag=1 must be true or false'),
    ('flag=True', 'flag=True must be true or false'),
    ('flag=', 'flag= must be true or false'),
  ],
)
def test_bad_arguments(arg, message):
  with pytest.raises(ValueError, match=message):
    common.parse_arg(arg, n=1, flag=True, name='z')


def test_no_arguments_at_all():
  with pytest.raises(ValueError, match='there are: none'):
    base.get_config('x=1')


# configs/sizes.py


def test_comments_beside_the_rungs_are_what_is_computed():
  source = inspect.getsource(sizes)
  for name in sizes.RUNGS:
    assert f"  # {sizes.describe(name)}\n  '{name}': " in source


@pytest.mark.parametrize('name', list(sizes.RUNGS))
def test_parameters_of_a_rung_are_those_of_the_model(name):
  (cell,) = sweep.expand(Config(), lambda add: add(sizes.rung(name)))
  config = cell.config
  rule = init_rules.make_rule(config.init, config.model)
  params = jax.tree_util.tree_leaves_with_path(
    model.abstract_params(config.model, rule)
  )
  count = {'all': 0, 'embedding': 0}
  for path, leaf in params:
    size = int(np.prod(leaf.shape))
    count['all'] += size
    if sizes.VOCABULARY in leaf.shape:
      count['embedding'] += size
  non_embedding = count['all'] - count['embedding']
  assert sizes.parameters(name) == (non_embedding, count['all'])


@pytest.mark.parametrize('name', list(sizes.RUNGS))
def test_rungs(name):
  bundle = sizes.rung(name)
  assert next(iter(bundle)) == 'size'
  shape = {k: v for k, v in bundle.items() if k.startswith('model.')}
  assert set(shape) == {f'model.{letter}' for letter in 'DFLNKHV'}
  assert shape['model.N'] * shape['model.H'] == shape['model.D']
  per_step = bundle['train.batch_size'] * bundle['train.seq_len']
  seen = bundle['train.steps'] * per_step
  assert 0 <= seen - sizes.tokens(name) < per_step


def test_the_largest_rung_is_the_one_of_the_memory_study():
  bundle = sizes.rung('1.5B')
  assert [bundle[f'model.{letter}'] for letter in 'DFLNKHV'] == [
    2048,
    5632,
    24,
    16,
    8,
    128,
    100352,
  ]


def test_unknown_rung():
  with pytest.raises(ValueError, match="no size '7B'; there are 0.1B, "):
    sizes.rung('7B')


# configs/moe.py


def test_comments_beside_the_moe_rungs_are_what_is_computed():
  source = inspect.getsource(moe)
  for name in moe.RUNGS:
    assert f"  # {moe.describe(name)}\n  '{name}',\n" in source


@pytest.mark.parametrize('name', moe.RUNGS)
def test_parameters_of_a_moe_rung_are_those_of_the_model(name):
  (cell,) = sweep.expand(
    configure.resolve(moe.get_config()), lambda add: add(moe.rung(name))
  )
  count = flops.parameters(cell.config.model)
  active = count.active - count.embedding
  assert moe.parameters(name) == (active, count.active, count.total)


@pytest.mark.parametrize('name', list(sizes.RUNGS))
def test_a_moe_rung_costs_what_its_dense_rung_costs(name):
  blocks, dense = moe.parameters(name)[0], sizes.parameters(name)[0]
  assert 0 < blocks - dense < 0.005 * dense  # the router
  for key in ('train.steps', 'train.batch_size', 'model.D', 'model.L'):
    assert moe.rung(name)[key] == sizes.rung(name)[key]


def test_moe_grid():
  cells = expanded(moe)
  assert len(cells) == 6
  assert cells[0].id == 'size=tiny-moe,gamma=0.5,seed=0'
  assert len({configure.program_key(c.config) for c in cells}) == 1
  for cell in expanded(moe, 'sizes=0.1B+1.5B,seeds=1'):
    assert cell.config.model.moe.dispatch == 'ragged'
    configure.check_devices(cell.config, 64)
  with pytest.raises(ValueError, match='sizes=7B must be one of tiny'):
    moe.get_config('sizes=7B')


# The grids.


def test_tiny_grid():
  cells = expanded(sweep_tiny)
  arms = ['gamma=0.5', 'gamma=0.75', 'gamma=1.0', 'rule=fixed']
  assert [cell.id for cell in cells] == [
    f'{arm},seed={seed}' for seed in range(2) for arm in arms
  ]
  fixed = cells[3].config
  assert (fixed.init.rule, fixed.init.std) == ('fixed', 0.02)
  assert {cell.config.model.mlp for cell in cells} == {'gelu'}
  assert configure.program_key(cells[0].config) == configure.program_key(
    cells[-2].config
  )


def test_tiny_grid_with_arguments():
  cells = expanded(sweep_tiny, 'mlp=swiglu,seeds=3')
  assert len(cells) == 12
  assert {cell.config.model.mlp for cell in cells} == {'swiglu'}
  with pytest.raises(ValueError, match='mlp=glu must be one of gelu, swiglu'):
    sweep_tiny.get_config('mlp=glu')


def test_obstacles_grid():
  cells = expanded(obstacles)
  assert len(cells) == 2 * 2 * 3 * 2 * 3
  shapes = {configure.program_key(cell.config) for cell in cells}
  assert len(shapes) == 4  # epsilon and gamma are traced; size and gate are not


def test_anchor_grid():
  cells = expanded(anchor)
  assert len(cells) == 180
  shapes = {configure.program_key(c.config) for c in cells}
  assert len(shapes) == 4  # an MLP kind and a depth
  arg = 'mlp=gelu,layers=2+3,wd=0.01,gamma=0.5,seeds=2,steps=40'
  cells = expanded(anchor, arg)
  arm = 'mlp=gelu,L={},weight_decay=0.01,gamma=0.5,seed={}'
  assert [c.id for c in cells] == [
    arm.format(layers, seed) for layers in (2, 3) for seed in range(2)
  ]
  assert {c.config.train.steps for c in cells} == {40}
  fresh = expanded(anchor, f'{arg},first=3')
  assert [c.config.seed for c in fresh] == [3, 4, 3, 4]
  for bad, message in (
    ('mlp=glu', 'mlp=glu must be one of gelu'),
    ('layers=2.5', 'layers=2.5 must be numbers'),
    ('wd=', 'wd needs a value'),
  ):
    with pytest.raises(ValueError, match=message):
      anchor.get_config(bad)


def test_ladder_grid():
  cells = expanded(sweep_ladder)
  assert len(cells) == len({cell.id for cell in cells}) == 3 * 4 * 3
  for name in sweep_ladder.WIDTHS:
    rung = [c.config for c in cells if c.config.size == name]
    # One program a size, whatever its gamma and seed.
    assert len({configure.program_key(c) for c in rung}) == 1
    size = flops.parameters(rung[0].model).non_embedding
    assert re.search(rf'^  {name} +{size:,}$', sweep_ladder.__doc__, re.M)


def test_ladder_tunes_the_learning_rate():
  arg = 'sizes=m,gammas=0.5+1.0,lr=0.001+0.004,seeds=2,tokenizer=bpe4k'
  cells = expanded(sweep_ladder, arg)
  arm = 'size=m,gamma={},lr={},seed={}'
  assert [c.id for c in cells] == [
    arm.format(gamma, rate, seed)
    for gamma in (0.5, 1.0)
    for rate in (0.001, 0.004)
    for seed in range(2)
  ]
  assert [c.config.opt.lr for c in cells[:4]] == [0.001, 0.001, 0.004, 0.004]
  assert {c.config.model.V for c in cells} == {4096}
  assert {c.config.data.tokenizer for c in cells} == {'bpe4k'}
  # One rate is the config's, not a part of every name.
  (cell,) = expanded(sweep_ladder, 'sizes=s,gammas=1.0,lr=0.004,seeds=1')
  assert cell.config.opt.lr == 0.004
  assert 'opt.lr' not in cell.overrides
  for bad, message in (
    ('lr=fast', 'lr=fast must be numbers'),
    ('tokenizer=bpe', 'tokenizer=bpe must be one of bytes, bpe4k'),
  ):
    with pytest.raises(ValueError, match=message):
      sweep_ladder.get_config(bad)


def test_the_10m_model_has_as_many_parameters_as_its_header_says():
  (cell,) = expanded(bilingual_10m, 'steps=70')
  counts = flops.parameters(cell.config.model)
  total, rest = counts.total / 1e6, counts.non_embedding / 1e6
  assert f'{total:.1f} M parameters, {rest:.1f} M' in bilingual_10m.__doc__
  assert cell.config.train.steps == 70
  assert cell.config.data.source.endswith('offline-bi/*.jsonl')


def test_large_grid():
  cells = expanded(sweep_1p5b)
  assert len(cells) == 75
  assert cells[0].id == 'size=0.1B,gamma=0.5,seed=0'
  assert cells[4].id == 'size=0.1B,rule=fixed,seed=0'
  assert cells[-1].config.model.D == 2048
  for cell in cells:
    assert cell.config.model.V == 100352
    assert cell.config.train.seq_len == 4096
    assert cell.config.model.remat == 'full'
    configure.check_devices(cell.config, 64)
  assert len(expanded(sweep_1p5b, 'sizes=0.1B+0.4B,seeds=1')) == 10
  with pytest.raises(ValueError, match='sizes=7B must be one of 0.1B'):
    sweep_1p5b.get_config('sizes=7B')


def test_the_header_of_the_large_grid_counts_right():
  cells = expanded(sweep_1p5b)
  work = sum(
    6 * sizes.multiplying(cell.config.size) * sizes.tokens(cell.config.size)
    for cell in cells
  )
  assert f'{len(cells)} cells, {work:.0e} FLOPs'.replace('+', '') in (
    sweep_1p5b.__doc__
  )


@pytest.mark.parametrize('module', MODULES)
def test_headers_say_the_command(module):
  name = f'--config=configs/{pathlib.Path(module.__file__).name}'
  assert name in module.__doc__
  assert 'python -m gamma_jax.main' in module.__doc__


def test_every_config_file_is_tested_here():
  found = {p.stem for p in (ROOT / 'configs').glob('*.py')}
  tested = {m.__name__.split('.')[1] for m in (*MODULES, common, sizes)}
  assert found - {'__init__'} == tested

"""ConfigDict -> Config: every bad input, round trips, hashes, compile keys."""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from ml_collections import config_dict

from gamma_jax import config as config_lib
from gamma_jax import configure, init_rules, limits
from gamma_jax.config import Config
from gamma_jax.errors import ConfigError

NUMBERS = [
  path
  for path, kind in configure.fields().items()
  if 'float' in str(kind) and path != 'data.mixture'
]


def changed(path, value):
  return configure.replace_by_path(Config(), path, value)


def other_value(path):
  """Some valid-typed value that is not the default."""
  value = configure.get_by_path(Config(), path)
  if path == 'data.mixture':
    return {'en': 1.0}
  if value is None:
    return 3
  if isinstance(value, bool):
    return not value
  return f'{value}x' if isinstance(value, str) else value + 1


def test_nothing_given_is_the_default():
  assert configure.resolve({}) == Config()
  assert configure.validate(Config()) == Config()


def test_config_dict_and_mapping_resolve_alike():
  nested = {'init': {'gamma': 0.5, 'overrides': {'head': 1}}, 'seed': 3}
  expected = dataclasses.replace(
    Config(),
    seed=3,
    init=config_lib.InitConfig(
      gamma=0.5, overrides=config_lib.InitOverrides(head=1.0)
    ),
  )
  assert configure.resolve(nested) == expected
  assert configure.resolve(config_dict.ConfigDict(nested)) == expected
  assert isinstance(configure.resolve(nested).init.overrides.head, float)


def test_placeholders():
  nested = config_dict.ConfigDict()
  nested.data = config_dict.ConfigDict()
  nested.data.seed = config_dict.placeholder(int)
  assert configure.resolve(nested).data.seed is None
  nested.data.seed = 7
  assert configure.resolve(nested).data.seed == 7


def test_mixture_has_one_order():
  given = {'data': {'mixture': {'zh': 1, 'en': 0.5}}}
  for config in given, config_dict.ConfigDict(given):
    mixture = configure.resolve(config).data.mixture
    assert mixture == (('en', 0.5), ('zh', 1.0))


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    ({'sed': 1}, 'unknown key sed; did you mean seed?'),
    ({'init': {'gama': 1.0}}, 'unknown key init.gama; did you mean init.gamma'),
    ({'gamma': 1.0}, 'unknown key gamma; did you mean init.gamma?'),
    ({'init': {'lr': 1.0}}, 'unknown key init.lr; did you mean opt.lr?'),
    ({'init': {'overrides': {'heads': 1.0}}}, 'init.overrides.head?'),
    ({'log': {'zzzz': 1}}, 'known: log.every, log.mechanics, log.tensorboard'),
    ({'init': 3}, 'init is a group of keys, got 3'),
    ([], 'config is a group of keys'),
    ({'train': {'steps': 1000.0}}, r'an int, got 1000.0 \(float\); write 1000'),
    ({'train': {'steps': 0.5}}, r'train.steps: expected an int, got 0.5'),
    ({'train': {'steps': '5'}}, r"train.steps: expected an int, got '5'"),
    ({'train': {'steps': True}}, 'train.steps: expected an int, got True'),
    ({'train': {'steps': None}}, 'train.steps is not set; it is an int'),
    ({'opt': {'lr': 'abc'}}, "opt.lr: expected a float, got 'abc'"),
    ({'opt': {'lr': True}}, 'opt.lr: expected a float, got True'),
    ({'model': {'tied': 1}}, 'model.tied: expected a bool, got 1'),
    ({'model': {'mlp': 1}}, 'model.mlp: expected a string, got 1'),
    ({'data': {'seed': 1.0}}, 'data.seed: expected an int, got 1.0'),
    ({'data': {'mixture': 'en'}}, 'data.mixture: expected part: weight'),
    ({'data': {'mixture': ['en']}}, 'data.mixture: expected part: weight'),
    ({'data': {'mixture': 3}}, 'data.mixture: expected part: weight'),
    ({'data': {'mixture': {'en': 'x'}}}, "data.mixture.en: .* got 'x'"),
  ],
)
def test_bad_shape_of_input(given, message):
  with pytest.raises(ConfigError, match=message) as caught:
    configure.resolve(given)
  assert '\n' not in str(caught.value)


def test_numpy_scalars_become_python_numbers():
  config = configure.resolve(
    {'seed': np.int64(3), 'init': {'gamma': np.float32(0.5)}}
  )
  assert type(config.seed) is int
  assert type(config.init.gamma) is float
  json.dumps(configure.to_dict(config))


@pytest.mark.parametrize('path', NUMBERS)
@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf, -2.0])
def test_no_float_may_be_negative_or_not_finite(path, bad):
  with pytest.raises(ConfigError, match=f'^{path}={bad!r} must be'):
    configure.validate(changed(path, bad))


def test_every_number_has_a_range_and_every_choice_exists():
  numbers = {
    path
    for path, kind in configure.fields().items()
    if kind is not bool and any(n in str(kind) for n in ('int', 'float'))
  } - {'data.mixture'}
  assert set(limits.RANGES) == numbers
  assert set(limits.CHOICES) <= set(configure.fields())


def test_names_of_rules_agree_with_their_home():
  rules = init_rules.RULES
  assert limits.CHOICES['init.rule'] == rules
  deep = tuple(r for r in rules if o_std(r, L=2) != o_std(r, L=8))
  assert limits.DEPTH_AWARE == deep
  assert limits.FAN_IN == tuple(
    r for r in rules if o_std(r, fan_in=32) != o_std(r, fan_in=64)
  )


def o_std(name: str, L: int = 2, fan_in: int = 32) -> float:
  rule = init_rules.make_rule(
    dataclasses.replace(config_lib.InitConfig(), rule=name),
    dataclasses.replace(config_lib.ModelConfig(), L=L),
  )
  return rule.matrix_std('o', fan_in, 64)


@pytest.mark.parametrize(
  ('path', 'value', 'message'),
  [
    ('model.norm_eps', -1e-6, 'above 0'),
    ('model.norm_eps', 0.0, 'above 0'),
    ('opt.eps', 0.0, 'above 0'),
    ('init.std', 0.0, 'above 0'),
    ('opt.b1', 1.0, r'in \[0, 1\)'),
    ('opt.final_lr_fraction', 1.5, r'in \[0, 1\]'),
    ('opt.wsd_decay_fraction', 0.0, r'in \(0, 1\]'),
    ('data.heldout_percent', 100.0, r'in \(0, 100\)'),
    ('data.heldout_percent', 0.0, r'in \(0, 100\)'),
    ('model.L', 0, 'at least 1'),
    ('train.steps', 0, 'at least 1'),
    ('checkpoint.every', 0, 'at least 1'),
    ('seed', -1, r'in \[0, 2\^32\)'),
    ('seed', 2**32, r'in \[0, 2\^32\)'),
    ('opt.schedule_steps', 0, 'at least 1'),
    ('mesh.fsdp', -2, 'at least 1, or -1'),
    ('mesh.fsdp', 0, 'at least 1, or -1'),
    ('mesh.fsdp', -1, 'mesh.data and mesh.fsdp'),
    ('model.K', 3, 'model.N=4 query heads must be a multiple of the model.K=3'),
    ('model.H', 15, 'even'),
    ('train.accumulation', 3, 'train.batch_size=8 must be a multiple'),
    ('opt.warmup_steps', 500, 'must be below train.steps=500'),
    ('opt.schedule_steps', 50, 'must be below opt.schedule_steps=50'),
    ('data.source', '', 'data.source must not be empty'),
    ('data.mixture', {'en': 0.0}, 'data.mixture.en=0.0 must be'),
    ('data.mixture', {'en': math.inf}, 'data.mixture.en=inf must be'),
    ('data.mixture', [('en', 1.0), ('en', 2.0)], 'twice: en, en'),
    ('model.mlp', 'swigl', "did you mean 'swiglu'?"),
    ('model.gate', 'element', "did you mean 'elementwise'?"),
    ('model.remat', 'al', "one of 'none', 'full', 'dots'"),
    ('model.dtype', 'float16', "did you mean 'bfloat16'?"),
    ('model.param_dtype', 'Float32', "did you mean 'float32'?"),
    ('init.rule', 'Xavier', "did you mean 'xavier'?"),
    ('init.distribution', 'uniform', "one of 'normal', 'truncated_normal'"),
    ('init.down_fan_in', 'modl', "did you mean 'model'?"),
    ('opt.schedule', 'cos', "one of 'cosine', 'wsd', 'constant'"),
    ('platform', 'cuda', "one of '', 'cpu', 'gpu', 'tpu'"),
  ],
)
def test_values_out_of_range(path, value, message):
  with pytest.raises(ConfigError, match=message) as caught:
    configure.validate(changed(path, value))
  assert '\n' not in str(caught.value)
  assert path.rpartition('.')[2] in str(caught.value)


@pytest.mark.parametrize(
  ('init', 'message'),
  [
    (
      {'rule': 'fixed', 'overrides': {'head': 0.5}},
      "init.overrides.head=0.5 has no effect with init.rule='fixed'",
    ),
    ({'overrides': {'router': 0.5}}, 'with model.moe.experts=0; drop it'),
    ({'rule': 'gpt2', 'depth_scale': True}, 'already scales'),
    ({'rule': 'fixed', 'down_fan_in': 'model'}, 'has no effect'),
  ],
)
def test_settings_without_effect_are_refused(init, message):
  with pytest.raises(ConfigError, match=message):
    configure.validate(configure.resolve({'init': init}))


@pytest.mark.parametrize(
  'nested',
  [
    # A long schedule, stopped within its warm-up.
    {
      'opt': {'schedule_steps': 1000, 'warmup_steps': 100},
      'train': {'steps': 20},
    },
    {'opt': {'schedule': 'constant'}, 'train': {'steps': 20}},
    {'opt': {'warmup_steps': 0}, 'train': {'steps': 1}},
    {'model': {'norm_eps': 1e-30}},
    {'train': {'seq_len': 100}, 'model': {'attention_block': 64}},
    {'init': {'gamma': 0}},
  ],
)
def test_unusual_but_allowed(nested):
  configure.validate(configure.resolve(nested))


@pytest.mark.parametrize(
  ('model', 'role'), [({'gate': 'none'}, 'gate'), ({'tied': True}, 'head')]
)
def test_overrides_of_what_is_not_there_are_refused(model, role):
  nested = {'model': model, 'init': {'overrides': {role: 0.5}}}
  with pytest.raises(ConfigError, match=f'overrides.{role}=0.5 has no effect'):
    configure.validate(configure.resolve(nested))


def test_more_choices_than_experts():
  moe = {'experts': 4, 'top_k': 8}
  with pytest.raises(ConfigError, match='top_k=8 must not exceed'):
    configure.validate(configure.resolve({'model': {'moe': moe}}))


def test_wsd_needs_room_for_its_decay():
  opt = {'schedule': 'wsd', 'warmup_steps': 90, 'wsd_decay_fraction': 0.2}
  with pytest.raises(ConfigError, match='20 steps of opt.wsd_decay_fraction'):
    configure.validate(configure.resolve({'opt': opt, 'train': {'steps': 100}}))


@pytest.mark.parametrize('path', list(configure.fields()))
def test_round_trip_through_json(path):
  config = changed(path, other_value(path))
  assert config != Config()
  text = json.dumps(configure.to_dict(config), allow_nan=False)
  assert configure.from_dict(json.loads(text)) == config


def test_round_trip_keeps_an_order_given_by_hand():
  config = changed('data.mixture', [('zh', 0.1), ('en', 0.2)])
  assert configure.from_dict(configure.to_dict(config)) == config


def test_a_key_that_an_older_version_lacked_is_its_default():
  old = configure.to_dict(Config())
  del old['model']['gate']
  assert configure.from_dict(old) == Config()


@pytest.mark.parametrize('path', list(configure.fields()))
def test_hash_covers_what_changes_numbers(path):
  config = changed(path, other_value(path))
  outside = (
    path.startswith(('mesh.', 'log.', 'checkpoint.', 'sweep.', 'plan.'))
    or path in ('size', 'platform', 'compile_cache', 'data.dir')
    or (path.startswith('eval.') and path[5:] not in ('every', 'documents'))
  )  # fmt: skip
  same = configure.config_hash(config) == configure.config_hash(Config())
  assert same == outside
  assert bool(configure.differences(Config(), config)) != outside


def test_hash_is_the_same_in_every_process():
  code = (
    'from gamma_jax import configure, config;'
    'print(configure.config_hash(config.Config()))'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == configure.config_hash(Config())
  assert len(done.stdout.strip()) == 16


def test_differences_name_both_values():
  config = changed('train.steps', 7)
  assert configure.differences(Config(), config) == ['train.steps (500, now 7)']


TRACED_OR_LABEL = (
  'seed size platform compile_cache model.norm_eps opt.lr opt.weight_decay'
).split()
TRACED_GROUPS = (
  'init.',
  'data.',
  'checkpoint.',
  'eval.',
  'log.',
  'sweep.',
  'plan.',
)


@pytest.mark.parametrize('path', list(configure.fields()))
def test_program_key_keeps_exactly_what_shapes_the_program(path):
  config = changed(path, other_value(path))
  key, base = configure.program_key(config), configure.program_key(Config())
  free = path in TRACED_OR_LABEL or path.startswith(TRACED_GROUPS)
  assert (key == base) == free
  assert hash(key) is not None
  if not free:
    assert configure.get_by_path(key, path) == configure.get_by_path(
      config, path
    )


def test_paths_are_typed():
  config = configure.replace_by_path(Config(), 'init.gamma', 2)
  assert configure.get_by_path(config, 'init.gamma') == 2.0
  assert type(config.init.gamma) is float
  assert Config().init.gamma == 1.0
  config = configure.replace_by_path(config, 'init.overrides.mlp', 0.5)
  assert config.init.overrides.mlp == 0.5
  with pytest.raises(ConfigError, match='did you mean init.gamma'):
    configure.replace_by_path(config, 'init.gama', 1.0)
  with pytest.raises(ConfigError, match='did you mean train.steps'):
    configure.get_by_path(config, 'train.step')
  with pytest.raises(ConfigError, match='init is a group; set one of init.rul'):
    configure.replace_by_path(config, 'init', {})
  with pytest.raises(ConfigError, match='expected a float'):
    configure.replace_by_path(config, 'init.gamma', '1')


def test_describe_type():
  assert configure.describe_type('data.seed') == 'an int'
  assert configure.describe_type('init.overrides.head') == 'a float'
  assert configure.describe_type('data.mixture') == 'a dict of part: weight'


@pytest.mark.parametrize(
  ('nested', 'devices', 'message'),
  [
    ({}, 3, 'train.batch_size = 8 does not divide over 3 devices.*of 3 '),
    (
      {'train': {'accumulation': 2}},
      8,
      'train.batch_size / train.accumulation = 4 does not.*multiple of 16',
    ),
    ({'mesh': {'fsdp': 2}}, 16, 'over 16 devices'),
    ({'mesh': {'expert': 2}}, 16, 'over 16 devices'),
    ({'eval': {'batch_size': 12}}, 8, 'eval.batch_size=12'),
    ({'mesh': {'tensor': 8}}, 8, 'model.N=4 does not divide over mesh.tensor'),
    ({'mesh': {'tensor': 4}}, 8, 'model.K=2 does not divide over mesh.tensor'),
    ({'mesh': {'fsdp': 3}}, 8, 'does not multiply to 8 devices'),
    ({'mesh': {'data': 4}}, 8, 'does not multiply to 8 devices'),
    (
      {
        'mesh': {'fsdp': 8},
        'model': {'D': 60},
      },
      8,
      'model.D=60 does not divide',
    ),
    (
      {'mesh': {'expert': 4}, 'model': {'moe': {'experts': 6}}},
      4,
      'model.moe.experts=6 does not divide over mesh.expert = 4',
    ),
  ],
)
def test_devices_that_do_not_fit(nested, devices, message):
  with pytest.raises(ConfigError, match=message):
    configure.check_devices(configure.resolve(nested), devices)


@pytest.mark.parametrize(
  ('nested', 'devices'),
  [
    ({}, 1),
    ({}, 8),
    ({'mesh': {'fsdp': 4}}, 8),
    ({'mesh': {'tensor': 2}}, 16),
    ({'train': {'accumulation': 2}}, 4),
  ],
)
def test_devices_that_fit(nested, devices):
  configure.check_devices(configure.resolve(nested), devices)

"""Which values a config may hold; one clear line for each that it may not."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
from typing import NamedTuple

from gamma_jax import chips, limits_data
from gamma_jax.config import ROLES, Config, MoeConfig
from gamma_jax.errors import ConfigError
from gamma_jax.tasks import items

# The platform of a kernel of attention.
KERNELS = {'splash': 'tpu', 'cudnn': 'gpu'}
CHOICES = {
  'platform': ('', 'cpu', 'gpu', 'tpu'),
  'model.mlp': ('swiglu', 'gelu'),
  'model.gate': ('none', 'headwise', 'elementwise'),
  'model.remat': ('none', 'full', 'dots'),
  'model.dtype': ('float32', 'bfloat16'),
  'model.param_dtype': ('float32', 'bfloat16'),
  'model.attention': ('blocks', *KERNELS),
  'model.moe.dispatch': ('blocks', 'ragged', 'dense'),
  'init.rule': (
    'gamma',
    'fixed',
    'xavier',
    'he',
    'gpt2',
    'megatron',
    'small_wang',
  ),
  'init.distribution': ('normal', 'truncated_normal'),
  'init.down_fan_in': ('hidden', 'model'),
  'sweep.population': ('auto', 'off', 'map', 'vmap'),
  'sweep.launcher': ('local', 'print', 'submitit'),
  'opt.schedule': ('cosine', 'wsd', 'constant'),
}

# Rules that already scale residual outputs by depth, and those that read d_in.
DEPTH_AWARE = ('gpt2', 'megatron', 'small_wang')
FAN_IN = ('gamma', 'xavier', 'he')


class Interval(NamedTuple):
  """Numbers that a field may hold; never an infinity or a NaN."""

  text: str
  low: float
  high: float = math.inf
  low_in: bool = True
  high_in: bool = True

  def holds(self, x: float) -> bool:
    above = self.low <= x if self.low_in else self.low < x
    below = x <= self.high if self.high_in else x < self.high
    return above and below and math.isfinite(x)


_COUNT = Interval('at least 1', 1)
_MAYBE = Interval('at least 0', 0)
_ABOVE = Interval('above 0', 0, low_in=False)
_BETA = Interval('in [0, 1)', 0, 1, high_in=False)
_SEED = Interval('in [0, 2^32)', 0, 2**32 - 1)
_MESH = Interval('at least 1, or -1 for what is left', -1)
# Every number of a config is in this table: tested, so that a new field cannot
# go unchecked.
RANGES = {
  'seed': _SEED,
  **{f'model.{letter}': _COUNT for letter in 'DFLNKHV'},
  'model.norm_eps': _ABOVE,  # at 0 a row of zeros would give NaN
  'model.rope_theta': _ABOVE,
  'model.attention_block': _COUNT,
  'model.moe.experts': _MAYBE,
  'model.moe.top_k': _COUNT,
  'model.moe.F': _MAYBE,
  'model.moe.shared': _MAYBE,
  'model.moe.load_balance': _MAYBE,
  'model.moe.router_z': _MAYBE,
  'model.moe.bias_rate': _MAYBE,
  'model.moe.block': _COUNT,
  'init.gamma': _MAYBE,
  'init.std': _ABOVE,
  **{f'init.overrides.{role}': _MAYBE for role in ROLES},
  'opt.lr': _MAYBE,
  'opt.b1': _BETA,
  'opt.b2': _BETA,
  'opt.eps': _ABOVE,  # 0 divides a parameter without gradient by 0
  'opt.weight_decay': _MAYBE,
  'opt.clip': _MAYBE,
  'opt.warmup_steps': _MAYBE,
  'opt.schedule_steps': _COUNT,
  'opt.final_lr_fraction': Interval('in [0, 1]', 0, 1),
  'opt.wsd_decay_fraction': Interval('in (0, 1]', 0, 1, low_in=False),
  'train.steps': _COUNT,
  'train.batch_size': _COUNT,
  'train.seq_len': _COUNT,
  'train.accumulation': _COUNT,
  'train.z_loss': _MAYBE,
  'train.loss_chunk': _COUNT,
  # With nothing held out the evaluation would fail, at the end of the run.
  'data.heldout_percent': Interval(
    'in (0, 100)', 0, 100, low_in=False, high_in=False
  ),
  'data.seed': _SEED,
  'data.workers': _MAYBE,
  **{f'mesh.{axis}': _MESH for axis in ('data', 'fsdp', 'tensor', 'expert')},
  'checkpoint.every': _COUNT,
  'checkpoint.keep': _COUNT,
  'checkpoint.keep_every': _MAYBE,
  'eval.every': _MAYBE,
  'eval.batch_size': _COUNT,
  'eval.documents': _MAYBE,
  'eval.max_items': _MAYBE,
  'eval.shots': _MAYBE,
  'eval.new_tokens': _COUNT,
  'eval.temperature': _MAYBE,
  'eval.top_p': Interval('in (0, 1]', 0, 1, low_in=False),
  'eval.sample_seed': _SEED,
  'log.every': _COUNT,
  'log.mechanics': _MAYBE,
  'sweep.slurm.nodes': _COUNT,
  'sweep.slurm.gpus_per_node': _MAYBE,
  'sweep.slurm.timeout_min': _COUNT,
  'sweep.slurm.array_parallelism': _COUNT,
  'plan.mfu': Interval('in (0, 1]', 0, 1, low_in=False),
}


def check(config: Config) -> None:
  """Raises ConfigError at the first value that is out of range."""
  for path, allowed in CHOICES.items():
    _check_choice(path, operator.attrgetter(path)(config), allowed)
  for path, interval in RANGES.items():
    _check_range(path, operator.attrgetter(path)(config), interval)
  _check_model(config)
  _check_init(config)
  _check_schedule(config)
  _check_batch_and_mesh(config)
  limits_data.check(config)
  items.split(config.eval.tasks)
  if config.plan.target:
    chips.parse(config.plan.target)


def check_divisible(
  config: Config, *, rows: int, tensor: int, embed: int, expert: int
) -> None:
  """Checks that every sharded dimension divides.

  Args:
    config: one cell.
    rows: devices that hold different rows of a batch.
    tensor: devices that share heads, hidden units and vocabulary.
    embed: devices that share the model width.
    expert: devices that share the experts.

  Raises:
    ConfigError: names the field and the nearest way out.
  """
  train, model = config.train, config.model
  micro = train.batch_size // train.accumulation
  if micro % rows:
    per = ' / train.accumulation' if train.accumulation > 1 else ''
    step = rows * train.accumulation
    raise ConfigError(
      f'train.batch_size{per} = {micro} does not divide over {rows} devices; '
      f'take a multiple of {step} for train.batch_size'
    )
  if config.eval.batch_size % rows:
    raise ConfigError(
      f'eval.batch_size={config.eval.batch_size} does not divide over {rows} '
      f'devices; take a multiple of {rows}'
    )
  shared = [(f'model.{name}', 'mesh.tensor', tensor) for name in 'NKFV']
  shared.append(('model.D', 'mesh.fsdp * mesh.expert', embed))
  if model.moe.experts:
    shared.append(('model.moe.F', 'mesh.tensor', tensor))
    shared.append(('model.moe.experts', 'mesh.expert', expert))
  for path, axis, devices in shared:
    size = operator.attrgetter(path)(config)
    if size % devices:
      raise ConfigError(
        f'{path}={size} does not divide over {axis} = {devices} devices'
      )


def check_platform(config: Config, platform: str) -> None:
  """Checks that the kernels asked for exist on `platform` (cpu, gpu or tpu).

  Raises:
    ConfigError: names the field and the way out.
  """
  name = config.model.attention
  if KERNELS.get(name, platform) != platform:
    raise ConfigError(
      f'model.attention={name!r} runs on a {KERNELS[name].upper()}, not on '
      f"{platform}; model.attention='blocks' runs anywhere"
    )


def _check_range(path: str, value: float | None, interval: Interval) -> None:
  if value is not None and not interval.holds(value):
    raise ConfigError(f'{path}={value!r} must be a number {interval.text}')


def _check_choice(path: str, value: str, allowed: tuple[str, ...]) -> None:
  if value in allowed:
    return
  near = difflib.get_close_matches(value.lower(), allowed, 1)
  hint = f'; did you mean {near[0]!r}?' if near else ''
  names = ', '.join(repr(name) for name in allowed)
  raise ConfigError(f'{path}={value!r} is not one of {names}{hint}')


def _check_model(config: Config) -> None:
  model = config.model
  if model.N % model.K:
    raise ConfigError(
      f'model.N={model.N} query heads must be a multiple of the model.K='
      f'{model.K} kv heads'
    )
  if model.H % 2:
    raise ConfigError(
      f'model.H={model.H} must be even: RoPE turns pairs of channels'
    )
  _check_moe(config)
  _check_attention(config)


def _check_attention(config: Config) -> None:
  model, length = config.model, config.train.seq_len
  if config.platform:
    check_platform(config, config.platform)
  if model.attention != 'cudnn':
    return
  # What cuDNN's fused attention takes on every GPU that has it.
  needs = {
    f"model.dtype='bfloat16', not {model.dtype!r}": model.dtype == 'bfloat16',
    f'a model.H of 8, 16, ... 128, not {model.H}': (
      model.H % 8 == 0 and model.H <= 128
    ),
    f'an even train.seq_len, not {length}': length % 2 == 0,
  }
  for need, met in needs.items():
    if not met:
      raise ConfigError(f"model.attention='cudnn' needs {need}")


def _check_moe(config: Config) -> None:
  moe = config.model.moe
  if moe.experts and moe.top_k > moe.experts:
    raise ConfigError(
      f'model.moe.top_k={moe.top_k} must not exceed model.moe.experts='
      f'{moe.experts}'
    )
  if not moe.experts and moe != MoeConfig():
    raise ConfigError(
      'model.moe has no effect with model.moe.experts=0; set it above 0 or '
      'leave the group at its defaults'
    )


def _check_init(config: Config) -> None:
  # A setting that changes nothing would give arms that only look different.
  init, model = config.init, config.model
  absent = {
    'head': model.tied and 'model.tied',
    'gate': model.gate == 'none' and "model.gate='none'",
    'router': not model.moe.experts and 'model.moe.experts=0',
  }
  for role, gamma in dataclasses.asdict(init.overrides).items():
    why = init.rule != 'gamma' and f'init.rule={init.rule!r}'
    why = why or absent.get(role)
    if gamma is not None and why:
      raise ConfigError(
        f'init.overrides.{role}={gamma} has no effect with {why}; drop it'
      )
  if init.depth_scale and init.rule in DEPTH_AWARE:
    raise ConfigError(
      f'init.depth_scale: init.rule={init.rule!r} already scales residual '
      'outputs by depth; set it to False'
    )
  if init.down_fan_in != 'hidden' and init.rule not in FAN_IN:
    raise ConfigError(
      f'init.down_fan_in={init.down_fan_in!r} has no effect with init.rule='
      f"{init.rule!r}; leave it at 'hidden'"
    )


def _check_schedule(config: Config) -> None:
  """Warm-up must end before the schedule does.

  The schedule may be longer than the run: `train.steps` can stop it anywhere,
  even within the warm-up, if `opt.schedule_steps` says how long it really is.
  """
  opt = config.opt
  if opt.schedule == 'constant':
    return
  length = opt.schedule_steps or config.train.steps
  name = 'opt.schedule_steps' if opt.schedule_steps else 'train.steps'
  way_out = 'lower opt.warmup_steps or set opt.schedule_steps'
  if opt.warmup_steps >= length:
    raise ConfigError(
      f'opt.warmup_steps={opt.warmup_steps} must be below {name}={length}; '
      f'{way_out}'
    )
  decay = max(round(length * opt.wsd_decay_fraction), 1)
  if opt.schedule == 'wsd' and opt.warmup_steps + decay > length:
    raise ConfigError(
      f'opt.warmup_steps={opt.warmup_steps} and the {decay} steps of '
      f'opt.wsd_decay_fraction do not fit in {name}={length}; {way_out}'
    )


def _check_batch_and_mesh(config: Config) -> None:
  train = config.train
  if train.batch_size % train.accumulation:
    raise ConfigError(
      f'train.batch_size={train.batch_size} must be a multiple of '
      f'train.accumulation={train.accumulation}'
    )
  sizes = dataclasses.asdict(config.mesh)
  for axis, size in sizes.items():
    if not size:
      raise ConfigError(f'mesh.{axis}=0 must be {_MESH.text}')
  free = [f'mesh.{axis}' for axis, size in sizes.items() if size == -1]
  if len(free) > 1:
    raise ConfigError(f'only one axis can be -1, not {" and ".join(free)}')

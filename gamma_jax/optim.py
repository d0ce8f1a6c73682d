"""AdamW, its schedule and its decay mask, with traced lr and weight decay.

The optimizer is rebuilt from traced numbers inside the train step, so its
state holds no learning rate: a resumed run takes the rate from its config, and
cells that differ in lr or weight decay share one compile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from gamma_jax.config import OptConfig

# Last part of a parameter's path -> is it decayed? A name that is missing here
# is an error, so a new kind of parameter cannot slip into either group.
DECAY_BY_LEAF = {
  'kernel': True,
  'embedding': True,
  'scale': False,  # norm scales
}


def decay_mask(params):
  """Tree of bools over `params`: True where weight decay applies.

  Raises:
    ValueError: a leaf whose name DECAY_BY_LEAF does not cover.
  """

  def decide(path, _):
    # A parameter still in its box has one more, attribute-like, path entry.
    keys = [p.key for p in path if isinstance(p, jax.tree_util.DictKey)]
    if keys[-1] not in DECAY_BY_LEAF:
      where = '/'.join(keys)
      raise ValueError(f'no weight-decay decision for parameter {where}')
    return DECAY_BY_LEAF[keys[-1]]

  return jax.tree_util.tree_map_with_path(decide, params)


def schedule_shape(config: OptConfig, train_steps: int) -> optax.Schedule:
  """Learning rate over peak as a function of the update number (from 0).

  Update 0 already has a rate above zero: a first update of size zero would
  only shift every curve by one. The length is `schedule_steps`, so stopping a
  run early does not change its schedule; after it the rate stays at its end.
  """
  length = config.schedule_steps or train_steps
  warmup, final = config.warmup_steps, config.final_lr_fraction
  rise = optax.linear_schedule(0.0, 1.0, warmup) if warmup else None
  after = max(length - warmup, 1)
  if config.schedule == 'constant':
    main = optax.constant_schedule(1.0)
  elif config.schedule == 'cosine':
    main = optax.cosine_decay_schedule(1.0, after, alpha=final)
  elif config.schedule == 'wsd':
    decay = max(round(length * config.wsd_decay_fraction), 1)
    hold = max(after - decay, 0)
    main = optax.linear_schedule(1.0, final, decay, transition_begin=hold)
  else:
    raise ValueError(f'unknown schedule {config.schedule!r}')
  if rise is not None:
    main = optax.join_schedules([rise, main], [warmup])
  return lambda count: main(count + 1)


def make_optimizer(
  config: OptConfig, train_steps: int, lr, weight_decay
) -> optax.GradientTransformation:
  """Clip (once, global norm) then AdamW.

  Args:
    config: static settings.
    train_steps: schedule length when the config gives none.
    lr: peak learning rate; may be traced.
    weight_decay: decoupled decay, multiplied by the rate; may be traced.
  """
  shape = schedule_shape(config, train_steps)
  steps = [optax.clip_by_global_norm(config.clip)] if config.clip else []
  return optax.chain(
    *steps,
    optax.scale_by_adam(config.b1, config.b2, config.eps),
    optax.add_decayed_weights(weight_decay, mask=decay_mask),
    optax.scale_by_learning_rate(lambda count: lr * shape(count)),
  )


def to_float32(tree):
  """Optimizer arithmetic is float32 whatever the parameter dtype."""
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

"""One update and one evaluation of one cell, as pure functions.

Everything that a sweep varies at one shape (seed, gamma, std, norm eps,
learning rate, weight decay) enters as a traced `Hyper`, so every such cell
runs the same compiled program (program.py).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from gamma_jax import (
  init_rules,
  layers,
  losses,
  metrics,
  model,
  moe,
  optim,
  route,
)
from gamma_jax.config import Config


class Hyper(NamedTuple):
  """The traced numbers of one cell."""

  seed: jax.Array  # uint32
  gammas: dict[str, jax.Array]  # role -> float32
  std: jax.Array
  norm_eps: jax.Array
  lr: jax.Array
  weight_decay: jax.Array


class TrainState(struct.PyTreeNode):
  """What a checkpoint holds of the model.

  Once a loss or gradient is not finite, `alive` is False and nothing moves any
  more: the last good state is what is left, here and in a population.
  """

  step: jax.Array  # int32, completed updates
  alive: jax.Array  # bool
  params: dict
  opt_state: tuple
  moe_state: dict  # balancing biases; empty without


class Sums(NamedTuple):
  """Sums over micro-batches; the fields of losses.LossSums, and the experts'.

  They are divided once, by `tokens`, when all are added up.
  """

  nll_sum: jax.Array
  z_sum: jax.Array
  tokens: jax.Array
  correct: jax.Array
  moe: route.RouterStats | None  # moe.weighted, [L, ...]


def hyper(config: Config) -> Hyper:
  """Collects the traced numbers of a config."""
  gammas = init_rules.role_gammas(config.init)
  return Hyper(
    seed=np.uint32(config.seed),
    gammas={role: np.float32(g) for role, g in gammas.items()},
    std=np.float32(config.init.std),
    norm_eps=np.float32(config.model.norm_eps),
    lr=np.float32(config.opt.lr),
    weight_decay=np.float32(config.opt.weight_decay),
  )


def init_boxed_state(config: Config, h: Hyper) -> TrainState:
  """Draws parameters (boxed with their declarations) and optimizer state."""
  rule = init_rules.make_rule(config.init, config.model, h.gammas, h.std)
  tokens = jnp.zeros((1, 1), jnp.int32)
  params = model.Transformer(config.model, rule).init(
    jax.random.key(h.seed), tokens, tokens, tokens, h.norm_eps
  )['params']
  opt = _optimizer(config, h)
  opt_state = opt.init(optim.to_float32(params))
  return TrainState(
    step=jnp.int32(0),
    alive=jnp.bool_(True),
    params=params,
    opt_state=opt_state,
    moe_state=moe.initial_state(config.model),
  )


def _optimizer(config: Config, h: Hyper):
  return optim.make_optimizer(
    config.opt, config.train.steps, h.lr, h.weight_decay
  )


def transformer(config: Config) -> model.Transformer:
  """The model, to be applied; its rule matters only when it is drawn."""
  rule = init_rules.make_rule(config.init, config.model)
  return model.Transformer(config.model, rule)


def _apply(config: Config, h: Hyper, params, moe_state, batch, **kwargs):
  return transformer(config).apply(
    {'params': params, moe.STATE: moe_state},
    batch['inputs'],
    batch['segment_ids'],
    batch['positions'],
    h.norm_eps,
    **kwargs,
  )


def roles(config: Config) -> dict[str, str]:
  """Role of every parameter path of this shape."""
  rule = init_rules.make_rule(config.init, config.model)
  boxed = model.abstract_params(config.model, rule)
  return metrics.roles(layers.declarations(boxed))


def split_labels(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """[B, T + 1] rows -> inputs and labels [B, T].

  Position t predicts t + 1; a label counts when it belongs to the same
  document as its input, so nothing is asked across a document boundary. A
  batch with a 'loss_mask' [B, T + 1] asks for nothing but the tokens it marks.
  """
  segment_ids = batch['segment_ids']
  mask = segment_ids[:, 1:] == segment_ids[:, :-1]
  mask &= segment_ids[:, 1:] > 0
  if 'loss_mask' in batch:
    mask &= batch['loss_mask'][:, 1:]
  return {
    'inputs': batch['tokens'][:, :-1],
    'labels': batch['tokens'][:, 1:],
    'segment_ids': segment_ids[:, :-1],
    'positions': batch['positions'][:, :-1],
    'mask': mask,
  }


def summed_loss(config: Config, h: Hyper, params, batch, moe_state):
  """Loss summed over scored tokens (not averaged), and its parts."""
  (hidden, head), left = _apply(
    config, h, params, moe_state, batch, mutable=[moe.STATS]
  )
  sums = losses.token_losses(
    hidden,
    head,
    batch['labels'],
    batch['mask'],
    chunk=config.train.loss_chunk,
  )
  total = sums.nll_sum + config.train.z_loss * sums.z_sum
  if not config.model.moe.experts:
    return total, Sums(*sums, moe=None)
  experts = moe.weighted(left[moe.STATS]['layers'], sums.tokens)
  total += moe.auxiliary_loss(config.model.moe, experts)
  return total, Sums(*sums, moe=experts)


def mean_gradient(config: Config, h: Hyper, params, batch, moe_state):
  """Gradient of the mean loss over the tokens of all micro-batches.

  Sums are accumulated and divided once, so micro-batches with few real tokens
  do not weigh more than they should.
  """
  grad_fn = jax.grad(
    functools.partial(summed_loss, config, h, moe_state=moe_state),
    has_aux=True,
  )
  if (a := config.train.accumulation) == 1:
    grads, sums = grad_fn(params, batch)
  else:
    # Rows are interleaved so that each micro-batch stays spread over devices.
    micro = jax.tree.map(
      lambda x: jnp.swapaxes(x.reshape(-1, a, *x.shape[1:]), 0, 1), batch
    )
    first = jax.tree.map(
      jnp.zeros_like,
      jax.eval_shape(grad_fn, params, jax.tree.map(lambda x: x[0], micro)),
    )
    (grads, sums), _ = jax.lax.scan(
      lambda total, b: (
        jax.tree.map(jnp.add, total, grad_fn(params, b)),
        None,
      ),
      first,
      micro,
    )
  tokens = jnp.maximum(sums.tokens, 1).astype(jnp.float32)
  return jax.tree.map(lambda g: g.astype(jnp.float32) / tokens, grads), sums


def train_step(config: Config, role_of, state: TrainState, h: Hyper, batch):
  """One optimizer update -> (state, metrics of the update)."""
  batch = split_labels(batch)
  grads, sums = mean_gradient(config, h, state.params, batch, state.moe_state)
  params = optim.to_float32(state.params)
  updates, opt_state = _optimizer(config, h).update(
    grads, state.opt_state, params
  )
  new = jax.tree.map(
    lambda p, u, old: (p + u).astype(old.dtype), params, updates, state.params
  )
  tokens = jnp.maximum(sums.tokens, 1).astype(jnp.float32)
  shape = optim.schedule_shape(config.opt, config.train.steps)
  out = {
    'train/loss': sums.nll_sum / tokens,
    'train/accuracy': sums.correct / tokens,
    'train/log_z_squared': sums.z_sum / tokens,
    'train/tokens': sums.tokens,
    'opt/lr': h.lr * shape(state.step),
    'opt/grad_norm': metrics.global_norm(grads),
    'opt/update_norm': metrics.global_norm(updates),
    'opt/param_norm': metrics.global_norm(new),
  }
  for role, rms in metrics.rms_by_role(new, role_of).items():
    out[f'rms/params/{role}'] = rms
  moe_state = state.moe_state
  if sums.moe is not None:
    out |= moe.metrics(sums.moe, tokens)
    moe_state = moe.next_state(config.model.moe, moe_state, sums.moe)
  finite = jnp.isfinite(out['train/loss']) & jnp.isfinite(out['opt/grad_norm'])
  alive = state.alive & finite
  next_state = TrainState(state.step + 1, alive, new, opt_state, moe_state)
  return jax.tree.map(
    functools.partial(jnp.where, alive), next_state, state.replace(alive=alive)
  ), out


def eval_step(config: Config, params, h: Hyper, batch, moe_state) -> jax.Array:
  """NLL [B, T] in nats, 0 where nothing is scored."""
  hidden, head = _apply(config, h, params, moe_state, batch)
  nll = losses.token_nll(
    hidden, head, batch['labels'], chunk=config.train.loss_chunk
  )
  return jnp.where(batch['mask'], nll, 0.0)


def answer_step(config: Config, params, h: Hyper, batch, moe_state):
  """Log-probabilities, float32 [B, V], of what follows each row of inputs."""
  hidden, head = _apply(config, h, params, moe_state, batch)
  return losses.log_probabilities(hidden[:, -1], head)

"""Time of the experts' gradient on this machine, beside a dense MLP.

  python experiments/bench_moe.py --experts=16 --top_k=2 --mlp=gelu

The dense MLP has top_k * F hidden units, so the same FLOPs without a router.
Each way is timed in turn, round after round, so that a noisy neighbour slows
all of them; medians and their ratio to the dense MLP are printed.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta

from gamma_jax import init_rules, mlp, moe
from gamma_jax.config import InitConfig, ModelConfig, MoeConfig


def gradient(net, x, *args):
  """A compiled gradient over parameters and input, ready to be timed."""
  params = meta.unbox(jax.jit(net.init)(jax.random.key(0), x, *args)['params'])

  def total(params, x):
    y = net.apply({'params': params}, x, *args)
    y, stats = y if isinstance(y, tuple) else (y, None)
    # A curved loss: with a sum the cotangent is a constant to be folded.
    aux = 0.0 if stats is None else stats.balance + stats.z_sum
    return jnp.sum(jnp.sin(y)) + aux

  fn = jax.jit(jax.grad(total, argnums=(0, 1))).lower(params, x).compile()
  return functools.partial(fn, params, x)


class Plain(nn.Module):
  """The same MLP on [tokens, D]: the fastest a dense one gets here."""

  config: ModelConfig
  rule: init_rules.InitRule

  @nn.compact
  def __call__(self, x):
    c = self.config

    def kernel(name, *shape):
      return self.param(name, nn.initializers.lecun_normal(), shape)

    rows = x.reshape(-1, c.D)
    up, gate = rows @ kernel('up', c.D, c.F), None
    if c.mlp == 'swiglu':
      gate = rows @ kernel('gate', c.D, c.F)
    y = mlp.hidden_units(up, gate) @ kernel('down', c.F, c.D)
    return y.reshape(x.shape)


def candidates(args):
  """Name -> what is timed."""
  dense = ModelConfig(D=args.D, F=args.top_k * args.F, mlp=args.mlp)
  rule = init_rules.make_rule(InitConfig(gamma=0.5), dense)
  x = jax.random.normal(jax.random.key(1), (1, args.tokens, args.D))
  mask = jnp.ones((1, args.tokens), bool)
  out = {
    'dense MLP': gradient(mlp.Mlp(dense, rule), x),
    'in 2-D': gradient(Plain(dense, rule), x),
  }
  ways = [('blocks', int(b)) for b in args.blocks.split(',')]
  ways += [(name, 1) for name in args.others.split(',') if name]
  for name, block in ways:
    experts = MoeConfig(
      experts=args.experts, top_k=args.top_k, dispatch=name, block=block
    )
    config = ModelConfig(D=args.D, F=args.F, mlp=args.mlp, moe=experts)
    label = f'{name} {block}' if name == 'blocks' else name
    out[label] = gradient(moe.Moe(config, rule), x, mask)
  return out


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--tokens', type=int, default=4096)
  parser.add_argument('--D', type=int, default=256)
  parser.add_argument('--F', type=int, default=512, help='of one expert')
  parser.add_argument('--experts', type=int, default=16)
  parser.add_argument('--top_k', type=int, default=2)
  parser.add_argument('--mlp', choices=('gelu', 'swiglu'), default='gelu')
  parser.add_argument('--blocks', default='64,128,256', help='block sizes')
  parser.add_argument('--others', default='', help='of ragged,dense')
  parser.add_argument('--rounds', type=int, default=15)
  args = parser.parse_args()
  fns = candidates(args)
  seconds = {name: [] for name in fns}
  for i in range(args.rounds + 1):
    for name, fn in fns.items():
      began = time.perf_counter()
      jax.block_until_ready(fn())
      if i:  # the first round warms up
        seconds[name].append(time.perf_counter() - began)
  base = statistics.median(seconds['in 2-D'])
  print(
    f'{jax.devices()[0].device_kind}: gradient, {args.tokens} tokens, '
    f'D {args.D}, F {args.F}, {args.mlp}, top {args.top_k} of {args.experts}'
  )
  for name, times in seconds.items():
    median = statistics.median(times)
    print(
      f'{name:12} {1e3 * median:8.1f} ms  min {1e3 * min(times):8.1f}  '
      f'{median / base:5.2f}x'
    )


if __name__ == '__main__':
  main()

"""Attention kernels of accelerators, by name; attend.py is their reference.

Nothing here chooses: a kernel that the platform lacks is refused before work
starts (limits.check_platform). Arguments, result and meaning are those of
attend.attend. Letters: see model.py.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from gamma_jax import sharding

# Tiles of splash attention: lengths are padded to the smallest. The default of
# the kernel, 128, loads each key four times as often as 512 does.
_TILES = (128, 256, 512)


def splash(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Splash attention of JAX's Pallas kernels, for TPUs.

  A tile above the diagonal is skipped; one of another document is not.

  Args:
    q: [B, T, N, H], any float dtype.
    k: [B, T, K, H]; K divides N.
    v: [B, T, K, H].
    segment_ids: [B, T] int; documents of a row, 0 is padding.
    interpret: run the kernel's program on any platform, slowly.

  Returns:
    [B, T, N, H] in q.dtype; zero, with zero gradient, at padding.
  """
  # Late: it imports Pallas, which only this kernel needs.
  from jax.experimental.pallas.ops.tpu import splash_attention as lib

  T, N, H = q.shape[1:]
  pad = -T % min(_TILES)
  # The kernel does not scale.
  heads = [
    jnp.moveaxis(jnp.pad(x, [(0, 0), (0, pad), (0, 0), (0, 0)]), 1, 2)
    for x in (q * jnp.asarray(H**-0.5, q.dtype), k, v)
  ]
  ids = jnp.pad(segment_ids, [(0, 0), (0, pad)])
  tile = max(size for size in _TILES if (T + pad) % size == 0)
  names = ('block_q', 'block_kv', 'block_kv_compute')
  names += ('block_q_dkv', 'block_kv_dkv', 'block_kv_dkv_compute')
  names += ('block_q_dq', 'block_kv_dq')
  kernel = lib.make_splash_mha_single_device(
    lib.MultiHeadMask([lib.CausalMask((T + pad, T + pad))] * N),
    block_sizes=lib.BlockSizes(**dict.fromkeys(names, tile)),
    interpret=interpret,
  )
  out = jax.vmap(kernel)(*heads, lib.SegmentIds(ids, ids))  # [B, N, T, H]
  return _real(jnp.moveaxis(out, 1, 2)[:, :T], segment_ids)


def cudnn(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  *,
  implementation: str = 'cudnn',
) -> jax.Array:
  """Fused attention of cuDNN, for NVIDIA GPUs; arguments as `splash`.

  Its interface in JAX knows no documents, so they come as a mask of T x T
  entries of a row, shared by the heads: 32 MiB a row of 4096 in bfloat16.

  Args:
    q: bfloat16; T even, H a multiple of 8.
    k: bfloat16.
    v: bfloat16.
    segment_ids: int.
    implementation: 'xla' computes the same by XLA, of any dtype: the tests'.
  """
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  out = jax.nn.dot_product_attention(
    q, k, v, mask=same[:, None], is_causal=True, implementation=implementation
  )
  return _real(out, segment_ids)


def over_devices(kernel: Callable) -> Callable:
  """`kernel` with rows and heads sharded as the rules say.

  The compiler cannot look into a kernel, so it would gather all of its
  arguments on every device.
  """
  batch, heads = map(sharding.axes_in_use, ('batch', 'heads'))
  if not batch + heads:
    return kernel
  rows, each = jax.P(batch), jax.P(batch, None, heads)
  return jax.shard_map(
    kernel,
    in_specs=(each, each, each, rows),
    out_specs=each,
    check_vma=False,  # a Pallas call does not say over what it varies
  )


def _real(out: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """`out` where there is a token; both kernels let padding see padding."""
  return jnp.where((segment_ids > 0)[:, :, None, None], out, 0)

"""How far the neurons of a weight matrix have aligned (condensation).

Everything here reads a matrix [neurons d_out, inputs d_in], one row a neuron,
as the papers do. Flax kernels are (in, out), the transpose: pass them through
`as_matrix` first, or rows are inputs and the cosines mean something else.

Sources: stable rank and row cosines, arXiv 2606.17945; neurons grouped at
cosine 0.7, arXiv 2405.05409; cosines among non-zero rows and effective rank,
arXiv 2510.06954. Condensed means aligned or opposed, so cosines are absolute.

Cosines need n^2 pairs, so at most `limit` neurons take part: every
(d_out / limit)-th row, always the same ones. Zero rows have no direction and
are left out. A quantity of which nothing is left is 0; NaN stays NaN.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import csgraph

from gamma_jax import shapes

ALIGNED = 0.7  # |cosine| above which two neurons belong together (2405.05409)
LIMIT = 512
_SVD_LIMIT = 512
_PRODUCTS = 32  # W'W v products; off by 0.2% at most on Gaussians, the worst


def as_matrix(kernel: jax.Array, axes: shapes.Axes) -> jax.Array:
  """Any kernel -> [*batch, d_out, d_in], batch axes in the order of `axes`.

  Per head instead of per matrix: name the head axis as a batch axis.

  Raises:
    ValueError: `axes` do not name every axis of the kernel exactly once.
  """
  d_in, d_out = axes.fans(kernel.shape)
  batch = [kernel.shape[a] for a in axes.batch_axis]
  order = (*axes.batch_axis, *axes.out_axis, *axes.in_axis)
  return kernel.transpose(order).reshape(*batch, d_out, d_in)


def stable_rank(w: jax.Array) -> jax.Array:
  """||W||_F^2 / ||W||_2^2 of w [d_out, d_in]; 0 for a zero matrix.

  Does not depend on the scale of w, down to the smallest normal float32. Of
  an i.i.d. Gaussian see `random_stable_rank`.
  """
  w = w.astype(jnp.float32)
  w = w / _nonzero(jnp.max(jnp.abs(w)))  # squares of 1e-30 would underflow
  total = jnp.sum(jnp.square(w))
  return total / _nonzero(_largest_eigenvalue(w))


def random_stable_rank(d_out: int, d_in: int) -> float:
  """Stable rank of a large i.i.d. Gaussian: d1 d2 / (sqrt d1 + sqrt d2)^2.

  The largest singular value stays a little below its limit, so real draws lie
  above this: by 3% at 64 x 256, by 1% at 1024 x 1024.
  """
  return d_out * d_in / (d_out**0.5 + d_in**0.5) ** 2


def _largest_eigenvalue(w: jax.Array) -> jax.Array:
  """Of W'W, from below: power iteration that keeps all of its iterates.

  The best vector within their span (Rayleigh-Ritz) is as good after 32
  products as the last iterate is after hundreds: the top singular values of a
  Gaussian lie close together, where plain power iteration is slow. The start
  is one fixed Gaussian vector, the same in every run.
  """
  wide = w.shape[0] < w.shape[1]
  width = min(w.shape)

  def product(v):  # W'W v, or WW'v, without a transposed copy of w
    return _dot(w, _dot(v, w)) if wide else _dot(_dot(w, v), w)

  def step(i, carry):
    basis, v = carry
    basis = basis.at[i].set(v)
    v = _unit(product(v))
    v = v - _dot(_dot(basis, v), basis)
    # Less is rounding: the basis already holds all that it can reach.
    v = jnp.where(jnp.linalg.norm(v) < 1e-5, 0.0, v)
    v = _unit(v)
    # Once more, for what rounding left of the basis in a short remainder.
    v = _unit(v - _dot(_dot(basis, v), basis))
    return basis, v

  start = _unit(jax.random.normal(jax.random.key(0), (width,)))
  basis = jnp.zeros((min(_PRODUCTS, width), width))
  basis, _ = jax.lax.fori_loop(0, len(basis), step, (basis, start))
  images = _dot(basis, w) if wide else _dot(w, basis.T).T
  return jnp.linalg.eigvalsh(_dot(images, images.T))[-1]


def effective_rank(w: Any) -> np.ndarray:
  """exp(entropy of s / sum(s)) of the singular values of w [..., d_out, d_in].

  On the host in float64, for any number of matrices: small singular values
  count here, and their squares in the Gram matrix would drown in float32.
  Costs d1 d2 min(d1, d2) multiply-adds and an eigvalsh of min(d1, d2): seconds
  at 2048 x 5632. 0 for a zero matrix.
  """
  w = np.asarray(w, np.float64)
  w = w / _nonzero_np(np.abs(w).max(axis=(-2, -1), keepdims=True))
  w = w if w.shape[-2] <= w.shape[-1] else w.swapaxes(-2, -1)
  eigenvalues = np.linalg.eigvalsh(w @ w.swapaxes(-2, -1))
  s = np.sqrt(np.maximum(eigenvalues, 0.0))  # rounding makes some negative
  share = s / _nonzero_np(s.sum(axis=-1, keepdims=True))
  entropy = -np.sum(share * np.log(_nonzero_np(share)), axis=-1)
  return np.where(s[..., -1] == 0, 0.0, np.exp(entropy))


def _effective_rank32(w: jax.Array) -> jax.Array:
  """`effective_rank` of one w on the device, by a float32 SVD."""
  w = w.astype(jnp.float32)
  s = jnp.linalg.svd(w / _nonzero(jnp.max(jnp.abs(w))), compute_uv=False)
  share = s / _nonzero(jnp.sum(s))
  entropy = -jnp.sum(share * jnp.log(_nonzero(share)))
  return jnp.where(s[0] == 0, 0.0, jnp.exp(entropy))


def mean_abs_cosine(w: jax.Array, limit: int = LIMIT) -> jax.Array:
  """Mean |cosine| of two different neurons of w [d_out, d_in]."""
  cosines, alive = _abs_cosines(w, limit)
  pairs = jnp.where(jnp.eye(len(cosines), dtype=bool), 0.0, cosines)
  return jnp.sum(pairs) / jnp.maximum(alive * (alive - 1), 1.0)


def random_mean_abs_cosine(d_in: int) -> float:
  """E|cosine| of two independent Gaussian rows; about sqrt(2 / (pi d_in))."""
  log = math.lgamma(d_in / 2) - math.lgamma((d_in + 1) / 2)
  return math.exp(log) / math.pi**0.5


def largest_cluster_share(w: jax.Array, limit: int = LIMIT) -> jax.Array:
  """Share of neurons that are aligned with one neuron, the best one.

  The largest number of neurons with |cosine| > 0.7 to a neuron, itself
  included, over the neurons that take part. 1 / n of them when none is
  aligned. See `largest_component_share` for clusters that may chain.
  """
  cosines, alive = _abs_cosines(w, limit)
  aligned = jnp.heaviside(cosines - ALIGNED, 0.0)  # unlike >, keeps NaN
  return jnp.max(jnp.sum(aligned, axis=1)) / jnp.maximum(alive, 1.0)


def largest_component_share(w: Any, limit: int | None = None) -> float:
  """As `largest_cluster_share`, with alignment passed on from row to row.

  The largest connected component of the graph of |cosine| > 0.7, on the host
  in float64; never below `largest_cluster_share` of the same neurons.

  Args:
    w: [d_out, d_in].
    limit: most neurons that take part; None takes all, d_out^2 floats.
  """
  w = np.asarray(w, np.float64)
  w = w[_rows(len(w), limit or len(w))]
  size = np.abs(w).max(axis=1, keepdims=True)
  w = w[size[:, 0] != 0] / size[size[:, 0] != 0]
  if not len(w):
    return 0.0
  w = w / np.linalg.norm(w, axis=1, keepdims=True)
  _, label = csgraph.connected_components(np.abs(w @ w.T) > ALIGNED)
  return float(np.bincount(label).max() / len(w))


def ordered_cosines(w: Any, limit: int = 256) -> np.ndarray:
  """Cosines between neurons, those that point alike beside one another.

  S_ij = cos(w_i, w_j), rows and columns in the order of the entries of S's
  leading eigenvector (2510.06954). Of at most `limit` neurons, without zero
  rows; float64 [n, n] on the host, signed.
  """
  w = np.asarray(w, np.float64)
  w = w[_rows(len(w), limit)]
  size = np.linalg.norm(w, axis=1)
  w = w[size > 0] / size[size > 0, None]
  cosines = w @ w.T
  if not len(w):
    return cosines
  order = np.argsort(np.linalg.eigh(cosines)[1][:, -1])
  return cosines[np.ix_(order, order)]


def frobenius(w: jax.Array) -> jax.Array:
  """||W||_F in float32."""
  w = w.astype(jnp.float32)
  size = _nonzero(jnp.max(jnp.abs(w)))
  return size * jnp.sqrt(jnp.sum(jnp.square(w / size)))


def matrix_metrics(w: jax.Array, limit: int = LIMIT) -> dict[str, jax.Array]:
  """What is cheap enough to follow in training, of one w [d_out, d_in].

  About 70 passes over w and limit^2 d_in multiply-adds; 'effective_rank' only
  up to 512 on the short side, beyond which the SVD would cost more than that.
  """
  out = {
    'stable_rank': stable_rank(w),
    'mean_abs_cosine': mean_abs_cosine(w, limit),
    'cluster_share': largest_cluster_share(w, limit),
    'frobenius': frobenius(w),
  }
  if min(w.shape) <= _SVD_LIMIT:
    out['effective_rank'] = _effective_rank32(w)
  return out


def _rows(rows: int, limit: int) -> np.ndarray:
  """Indices of at most `limit` rows, evenly spread."""
  count = min(rows, limit)
  return np.arange(count) * rows // count


def _abs_cosines(w: jax.Array, limit: int) -> tuple[jax.Array, jax.Array]:
  """|cosine| of the neurons taken [n, n], and how many are not zero."""
  w = w[_rows(len(w), limit)].astype(jnp.float32)
  size = jnp.max(jnp.abs(w), axis=1, keepdims=True)
  w = w / _nonzero(size)
  w = w / _nonzero(jnp.linalg.norm(w, axis=1, keepdims=True))
  return jnp.abs(_dot(w, w.T)), jnp.sum(size != 0).astype(jnp.float32)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
  # The default would be TF32 or bfloat16 on accelerators.
  return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _unit(v: jax.Array) -> jax.Array:
  return v / _nonzero(jnp.linalg.norm(v))


def _nonzero(x: jax.Array) -> jax.Array:
  """x to divide by: 1 in place of 0, where the numerator is 0 too."""
  return jnp.where(x == 0, 1.0, x)


def _nonzero_np(x: np.ndarray) -> np.ndarray:
  return np.where(x == 0, 1.0, x)

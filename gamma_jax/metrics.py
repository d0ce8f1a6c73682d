"""Numbers about trees of arrays, by role. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from gamma_jax import init_rules, layers


def global_norm(tree) -> jax.Array:
  """Euclidean norm over all leaves, float32."""
  return jnp.sqrt(
    sum(
      jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)
    )
  )


def roles(declarations: Mapping[str, layers.Declared]) -> dict[str, str]:
  """Maps each parameter path to its role; norm scales to 'norm'."""
  return {
    path: init_rules.ROLE_OF_KIND.get(d.kind, 'norm')
    for path, d in declarations.items()
  }


def rms_by_role(tree, role_of: Mapping[str, str]) -> dict[str, jax.Array]:
  """Root mean square of the entries of each role."""
  squares: dict[str, list[jax.Array]] = {}
  counts: dict[str, int] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    role = role_of['/'.join(p.key for p in path)]
    square = jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    squares.setdefault(role, []).append(square)
    counts[role] = counts.get(role, 0) + leaf.size
  return {r: jnp.sqrt(sum(s) / counts[r]) for r, s in squares.items()}

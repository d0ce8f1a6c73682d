"""How does the scale at which weights start decide what a model learns?"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from gamma_jax.audit_tree import audit
  from gamma_jax.initializers import gamma_normal
  from gamma_jax.redraw import reinit
  from gamma_jax.shapes import Axes
  from gamma_jax.tree_rules import EXEMPT

__all__ = ['EXEMPT', 'Axes', 'audit', 'gamma_normal', 'reinit']
__version__ = '0.1.0'

_HOME = {
  'EXEMPT': 'tree_rules',
  'Axes': 'shapes',
  'audit': 'audit_tree',
  'gamma_normal': 'initializers',
  'reinit': 'redraw',
}


def __getattr__(name: str):
  # Lazy, so that a command that reads files only does not start JAX.
  if name not in _HOME:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(f'{__name__}.{_HOME[name]}'), name)


def __dir__() -> list[str]:
  return sorted([*globals(), *__all__])

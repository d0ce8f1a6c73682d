"""How does the scale at which weights start decide what a model learns?"""

from gamma_jax.initializers import gamma_normal

__all__ = ['gamma_normal']
__version__ = '0.1.0'

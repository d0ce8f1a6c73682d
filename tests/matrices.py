"""Random matrices, and float64 references of what is said of them."""

import numpy as np


def gaussian(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def reference_stable_rank(w):
  s = np.linalg.svd(np.asarray(w, np.float64), compute_uv=False)
  return np.sum(s**2) / s[0] ** 2


def reference_cosines(w):
  w = np.asarray(w, np.float64)
  w = w / np.linalg.norm(w, axis=1, keepdims=True)
  cosines = np.abs(w @ w.T)
  off = ~np.eye(len(w), dtype=bool)
  share = np.max(np.sum(cosines > 0.7, axis=1)) / len(w)
  return cosines[off].mean(), share

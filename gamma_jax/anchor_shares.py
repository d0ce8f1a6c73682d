"""Shares of composed and remembered answers (data/anchor.py says of what)."""

from __future__ import annotations

import numpy as np

from gamma_jax.data import anchor


def summarize(log_p: np.ndarray, rows: anchor.Rows) -> dict[str, float]:
  """Metrics of a predictor on held-out rows.

  Args:
    log_p: [B, V], log-probabilities of the answer.
    rows: the rows that were asked.

  Returns:
    heldout/loss (nats an answer), heldout/accuracy and heldout/tokens (answers
    scored) over the 14 composed pairs of training, and under /forced for the
    forced one. Of the mirror heldout/mirror/compositional, symmetric and other:
    shares of the likeliest answer, and heldout/mirror/p_*: mean probability;
    heldout/tokens/mirror counts it. A group without rows has no metrics.
  """
  groups = {'forced': anchor.FORCED, 'mirror': anchor.MIRROR}
  of = {k: (rows.pair == pair).all(axis=1) for k, pair in groups.items()}
  of['composed'] = ~(of['forced'] | of['mirror'])
  out: dict[str, float] = {}
  for name, suffix in (('composed', ''), ('forced', '/forced')):
    if of[name].any():
      got, right = log_p[of[name]], rows.tokens[of[name], -1]
      out[f'heldout/loss{suffix}'] = float(-np.mean(_picked(got, right)))
      hits = np.argmax(got, axis=1) == right
      out[f'heldout/accuracy{suffix}'] = float(np.mean(hits))
      out[f'heldout/tokens{suffix}'] = len(right)
  if of['mirror'].any():
    out |= _mirror(log_p[of['mirror']], rows.key[of['mirror']])
  return out


def _mirror(log_p: np.ndarray, key: np.ndarray) -> dict[str, float]:
  pair = np.tile(anchor.MIRROR, (len(key), 1))
  answers = {
    'compositional': anchor.composed(key, pair),
    'symmetric': key + anchor.FORCED_SHIFT,
  }
  likeliest = np.argmax(log_p, axis=1)
  share = {k: float(np.mean(likeliest == a)) for k, a in answers.items()}
  p = {k: float(np.mean(np.exp(_picked(log_p, a)))) for k, a in answers.items()}
  for values in (share, p):
    values['other'] = max(0.0, 1.0 - sum(values.values()))  # not by rounding
  return {
    **{f'heldout/mirror/{k}': v for k, v in share.items()},
    **{f'heldout/mirror/p_{k}': v for k, v in p.items()},
    'heldout/tokens/mirror': len(key),
  }


def _picked(log_p: np.ndarray, token: np.ndarray) -> np.ndarray:
  """float64 [B]: the log-probability of one token of each row."""
  return np.take_along_axis(log_p, token[:, None], 1)[:, 0].astype(np.float64)

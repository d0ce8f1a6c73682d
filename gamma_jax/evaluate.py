"""Held-out evaluation: sums over real tokens, standard errors by document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np


class DocumentSums:
  """NLL, tokens and bytes of every held-out document, added batch by batch.

  Args:
    n_documents: how many documents the batches index.
    token_bytes: [V] bytes of each token id, for bits per byte.
  """

  def __init__(self, n_documents: int, token_bytes: np.ndarray):
    self.nll = np.zeros(n_documents)
    self.tokens = np.zeros(n_documents, np.int64)
    self.bytes = np.zeros(n_documents, np.int64)
    self._token_bytes = token_bytes

  def add(self, nll: np.ndarray, batch: dict[str, np.ndarray]) -> None:
    """Adds one batch; `nll` and the fields of `batch` are [B, T]."""
    scored = batch['mask']
    doc = batch['doc'][scored]
    n = len(self.nll)
    # float64 sums: millions of float32 terms would drift with batch order.
    self.nll += np.bincount(doc, nll[scored].astype(np.float64), n)
    self.tokens += np.bincount(doc, minlength=n)
    size = self._token_bytes[batch['labels'][scored]]
    self.bytes += np.bincount(doc, size, n).astype(np.int64)


def ratio_stderr(numerator: np.ndarray, denominator: np.ndarray) -> float:
  """Standard error of sum(numerator) / sum(denominator) over documents.

  The linearised ratio estimator: documents are independent, tokens within one
  are not. NaN with fewer than two documents.
  """
  n = len(numerator)
  if n < 2:
    return float('nan')
  residual = numerator - denominator * (numerator.sum() / denominator.sum())
  variance = n / (n - 1) * np.square(residual).sum()
  return float(np.sqrt(variance) / denominator.sum())


def summarize(sums: DocumentSums, sources: Sequence[str]) -> dict[str, float]:
  """Metrics over all documents and by source.

  Args:
    sums: totals by document.
    sources: source name of each document.

  Returns:
    heldout/loss (nats per token), its stderr, bits per byte, counts; and loss,
    stderr, bits per byte and tokens of each source under heldout/*/<source>.
  """
  used = sums.tokens > 0
  names = np.array(sources)
  groups = {'': used}
  for source in sorted(set(names[used])):
    groups[f'/{source}'] = used & (names == source)
  out: dict[str, float] = {}
  for suffix, group in groups.items():
    nll, tokens = sums.nll[group], sums.tokens[group]
    size = sums.bytes[group].sum()
    out[f'heldout/loss{suffix}'] = float(nll.sum() / tokens.sum())
    out[f'heldout/loss_stderr{suffix}'] = ratio_stderr(nll, tokens)
    out[f'heldout/bits_per_byte{suffix}'] = float(nll.sum() / np.log(2) / size)
    out[f'heldout/tokens{suffix}'] = int(tokens.sum())
    out[f'heldout/documents{suffix}'] = int(group.sum())
  return out


def model_inputs(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The fields of an evaluation batch that a model reads."""
  return {k: v for k, v in batch.items() if k not in ('doc', 'label_index')}


def evaluate(
  nll_fn: Callable[[dict[str, np.ndarray]], np.ndarray],
  members: int,
  batches: Iterable[dict[str, np.ndarray]],
  sources: Sequence[str],
  token_bytes: np.ndarray,
) -> list[dict[str, float]]:
  """Scores every held-out token once -> metrics of each member.

  Args:
    nll_fn: batch of [B, T] arrays -> NLL [P, B, T] of P members.
    members: P.
    batches: dicts of [B, T] arrays from data.pipeline.eval_batches.
    sources: source name of each document index in the batches.
    token_bytes: [V] bytes of each token id.
  """
  sums = [DocumentSums(len(sources), token_bytes) for _ in range(members)]
  for batch in batches:
    nll = nll_fn(model_inputs(batch))
    for one, member_nll in zip(sums, nll, strict=True):
      one.add(member_nll, batch)
  return [summarize(one, sources) for one in sums]

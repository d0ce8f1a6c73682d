"""A trained cell as a model of lm-evaluation-harness.

Every text starts with the end-of-text token, as in training. A text longer
than train.seq_len is scored in windows that overlap by one token, as
--mode=eval cuts held-out documents, but for two conventions of the harness:
the last window is filled up with context, and the closing end-of-text token is
not scored.
"""

from __future__ import annotations

import pathlib

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from gamma_jax import score, trained
from gamma_jax.data import tokenizer as tokenizer_lib
from gamma_jax.errors import ConfigError

NEW_TOKENS = 256  # where a task does not say; the harness's own default


@register_model('gamma_jax')
class GammaLM(TemplateLM):
  """Answers the harness's three kinds of request.

  Args:
    path: folder of the cell, `<workdir>/<cell id>`.
    batch_size: rows scored at once.
    max_length: tokens that the model sees at once; None takes train.seq_len.
    max_batch_size: not used; the harness passes it.
    device: not used; JAX_PLATFORMS decides.
  """

  def __init__(
    self,
    path: str,
    batch_size: int | str = 1,
    max_length: int | None = None,
    max_batch_size: int | None = None,
    device: str | None = None,
  ):
    super().__init__()
    del max_batch_size, device
    if not str(batch_size).isdigit() or int(batch_size) < 1:
      raise ConfigError(f'batch_size={batch_size} must be a number from 1')
    model = trained.load(pathlib.Path(path))
    name = model.config.data.tokenizer
    self._tokens = tokenizer_lib.load_tokenizer(name)
    self._scorer = score.Scorer(model, int(batch_size))
    self._max_length = max_length or model.config.train.seq_len

  @property
  def eot_token_id(self) -> int:
    """Opens and closes every document."""
    return self._tokens.eot_id

  def tok_encode(self, string, add_special_tokens=None, **kwargs) -> list[int]:
    """Ids, after the end-of-text token unless it is declined."""
    ids = self._tokens.encode(string).tolist()
    return ids if add_special_tokens is False else [self.eot_token_id, *ids]

  def _loglikelihood_tokens(self, requests, **kwargs):
    """(text, context ids, continuation ids) -> (log-likelihood, is greedy)."""
    rows = []
    for _, context, continuation in requests:
      if len(continuation) > self._max_length:
        raise ConfigError(
          f'a continuation of {len(continuation)} tokens is longer than '
          f'max_length={self._max_length}'
        )
      # One more than fits: the last id is only a label.
      rows.append([*context, *continuation][-self._max_length - 1 :])
    answers = []
    for row, (nll, hit), request in zip(
      rows, self._scorer.score(rows), requests, strict=True
    ):
      start = len(row) - 1 - len(request[2])
      # float64, as evaluate.DocumentSums.
      answers.append((-float(nll[start:].sum(dtype=float)), hit[start:].all()))
    return [(total, bool(greedy)) for total, greedy in answers]

  def loglikelihood_rolling(self, requests, disable_tqdm=False) -> list[float]:
    """Log-likelihood of whole texts, in windows that overlap by one token."""
    pairs, texts = [], []
    for i, (text,) in enumerate(request.args for request in requests):
      windows = utils.get_rolling_token_windows(
        self.tok_encode(text, add_special_tokens=False),
        prefix_token=self.prefix_token_id,
        max_seq_len=self._max_length,
        context_len=1,
      )
      for window in windows:
        pairs.append((None, *utils.make_disjoint_window(window)))
        texts.append(i)
    totals = [0.0] * len(requests)
    for i, (total, _) in zip(texts, self._loglikelihood_tokens(pairs)):
      totals[i] += total
    return totals

  def generate_until(self, requests, disable_tqdm=False) -> list[str]:
    """Greedy continuations up to a stop text, the end of text or the limit."""
    return [self._generate(*request.args) for request in requests]

  def _generate(self, context: str, options: dict) -> str:
    if options.get('do_sample') and options.get('temperature', 1.0) > 0:
      raise ConfigError('generate_until is greedy: set do_sample: false')
    stops = options.get('until') or []
    stops = [stops] if isinstance(stops, str) else stops
    most = options.get('max_gen_toks', NEW_TOKENS)
    room = self._max_length - most
    if room < 1:
      raise ConfigError(
        f'max_gen_toks={most} leaves no room for a context in max_length='
        f'{self._max_length}; lower it with --gen_kwargs max_gen_toks=N'
      )

    def text(ids):
      return self._tokens.decode(ids).decode('utf-8', 'replace')

    def is_end(ids):
      return ids[-1] == self.eot_token_id or any(s in text(ids) for s in stops)

    prompt = self.tok_encode(context)[-room:]
    answer = text(self._scorer.greedy(prompt, most, is_end))
    for stop in filter(None, stops):
      answer = answer.split(stop, 1)[0]
    return answer

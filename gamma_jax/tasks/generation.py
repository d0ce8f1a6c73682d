"""Problems by generation: prompts in, texts out, answers checked."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gamma_jax import decode, train_step
from gamma_jax import program as program_lib
from gamma_jax.config import Config
from gamma_jax.data import tokenizer as tokenizer_lib
from gamma_jax.tasks import rates
from gamma_jax.tasks.items import Problem

CHUNK = 32  # tokens between two looks for a stop string
_ROUND = 32  # prompts are padded to a multiple of this, so that few compile


class Written(NamedTuple):
  """What a model made of one problem."""

  text: str  # up to the stop string
  ended: bool  # by eot or a stop string, not by running out of tokens
  cut: bool  # the prompt lost its start


class Writer:
  """Generates text from one set of weights.

  Args:
    config: its model, eval and train groups are read.
    program: compiled functions.
    weights: (params, moe_state) of the model.
    tokenizer: of the model.
  """

  def __init__(
    self,
    config: Config,
    program: program_lib.Program,
    weights: tuple,
    tokenizer: tokenizer_lib.Tokenizer,
  ):
    self._eval, self._tokenizer = config.eval, tokenizer
    self._program = program
    params, moe_state = weights
    self._at = (params, train_step.hyper(config), moe_state)
    # Never beyond the positions that the model was trained on.
    T = config.train.seq_len
    self.new_tokens = min(config.eval.new_tokens, max(T // 2, 1))
    self._room = max(T - self.new_tokens, 1)

  def write(self, problems: Sequence[Problem], name: str) -> list[Written]:
    """Texts for all problems, in their order; the batch size changes none.

    `name` is the task's: another one has other draws.
    """
    seed = zlib.crc32(f'{self._eval.sample_seed} {name}'.encode())
    eot, encode = self._tokenizer.eot_id, self._tokenizer.encode
    prompts, cut = [], []
    for problem in problems:
      ids = encode(problem.prompt.rstrip(' '))
      keep = min(len(ids), self._room - 1)
      prompts.append([eot, *ids[len(ids) - keep :].tolist()])
      cut.append(keep < len(ids))
    longest = max(map(len, prompts))
    T = min(-(-longest // _ROUND) * _ROUND, max(self._room, longest))
    found: list[Written] = []
    B = self._eval.batch_size
    for start in range(0, len(prompts), B):
      part = slice(start, start + B)
      stops = [problem.stop for problem in problems[part]]
      texts = self._batch(prompts[part], stops, (seed, start), T)
      found += [Written(*t, c) for t, c in zip(texts, cut[part], strict=True)]
    return found

  def _batch(self, prompts, stops, draws: tuple[int, int], T: int):
    """[(text, ended)] of up to B prompts; `draws`: seed, number of the first.

    The device stops rows at eot. Stop strings are looked for here, between
    chunks, as their tokens depend on what is around them.
    """
    B, eot = self._eval.batch_size, self._tokenizer.eot_id
    given = {
      'tokens': np.full((B, T), eot, np.int32),
      'lengths': np.zeros(B, np.int32),
    }
    for b, ids in enumerate(prompts):
      given['tokens'][b, : len(ids)] = ids
      given['lengths'][b] = len(ids)
    chunk = min(CHUNK, self.new_tokens)
    chunks = -(-self.new_tokens // chunk)
    put = self._program.put_batch
    decoding = self._program.prefill(*self._at, put(given), T + chunks * chunk)
    choice = (np.int32(eot), self._sampling(*draws))
    tokens = np.zeros((B, 0), np.int32)
    for _ in range(chunks):
      decoding, new = self._program.extend(*self._at, decoding, choice, chunk)
      tokens = np.concatenate([tokens, np.asarray(new)], axis=1)
      texts = [self._text(t, s) for t, s in zip(tokens, stops)]
      done = np.ones(B, bool)
      done[: len(texts)] = [ended for _, ended in texts]
      if done.all():
        break
      decoding = decoding._replace(**put({'done': done}))
    return texts

  def _text(self, tokens: np.ndarray, stop: Sequence[str]) -> tuple[str, bool]:
    """(text of the tokens up to eot or a stop string, whether one came)."""
    tokens = tokens[: self.new_tokens]
    ends = np.flatnonzero(tokens == self._tokenizer.eot_id)
    ended = bool(len(ends))
    ids = tokens[: ends[0]] if ended else tokens
    text = self._tokenizer.decode(ids).decode('utf-8', 'replace')
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    return (text[: min(found)], True) if found else (text, ended)

  def _sampling(self, seed: int, first: int) -> decode.Sampling | None:
    e = self._eval
    if not e.temperature:
      return None
    item = np.arange(first, first + e.batch_size, dtype=np.uint32)
    return decode.Sampling(
      seed=np.uint32(seed),
      item=item,
      temperature=np.float32(e.temperature),
      top_p=np.float32(e.top_p),
    )


def summarize(
  problems: Sequence[Problem],
  written: Sequence[Written],
  check: Callable[[str, Any], bool],
) -> tuple[dict, list[bool]]:
  """(pass rate with its 95 % interval and counts, which were right)."""
  right = [
    bool(check(w.text, p.answer))
    for p, w in zip(problems, written, strict=True)
  ]
  return {
    'items': len(problems),
    **rates.rate('pass', right),
    'ended': sum(w.ended for w in written),
    'prompts_cut': sum(w.cut for w in written),
  }, right

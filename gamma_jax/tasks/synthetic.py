"""Tasks that need no download: from held-out text, and generated ones.

They exercise the code of the real sets and compare arms. They mean nothing
against published scores, so they never carry a real name. The same held-out
documents give the same items every time.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np

from gamma_jax.errors import ConfigError
from gamma_jax.tasks import items as items_lib
from gamma_jax.tasks.items import Choice, Problem

COUNT = 200  # items where none is asked for
CHOICES = 4
CONTEXT, CONTINUATION, LEAST = 200, 60, 8  # characters


def make(
  name: str, documents: Sequence[tuple[str, str]], count: int
) -> list[Choice] | list[Problem]:
  """The first `count` items (0: COUNT) of synth_cloze, _copy or _arith.

  Args:
    name: of items.SYNTHETIC.
    documents: (part, text) of held-out documents; synth_arith needs none.
    count: most items.

  Raises:
    ConfigError: the held-out text is too little.
  """
  count = count or COUNT
  if name == 'synth_arith':
    return arith(count)
  found = (cloze if name == 'synth_cloze' else copy)(documents, count)
  if not found:
    raise ConfigError(
      f'eval.tasks: the held-out text is too short for {name}; raise '
      'data.heldout_percent'
    )
  return found


def cloze(documents: Sequence[tuple[str, str]], count: int) -> list[Choice]:
  """The true continuation of a document among three of other documents.

  The others are of the same part (language, domain), so that this alone gives
  nothing away.
  """
  cut = [(part, *_cut(text)) for part, text in documents]
  cut = [(part, p, c) for part, p, c in cut if min(len(p), len(c)) >= LEAST]
  pools: dict[str, list[str]] = {}
  for part, _, continuation in cut:
    pools.setdefault(part, []).append(continuation)
  # A set of its own would change order between processes.
  pools = {part: list(dict.fromkeys(pool)) for part, pool in pools.items()}
  found = []
  for part, prompt, right in cut:
    if len(pools[part]) >= CHOICES and len(found) < count:
      rng = np.random.default_rng(zlib.crc32((prompt + right).encode()))
      others = [c for c in pools[part] if c != right]
      picked = rng.choice(len(others), CHOICES - 1, replace=False)
      choices = [others[i] for i in picked]
      answer = int(rng.integers(CHOICES))
      choices.insert(answer, right)
      found.append(Choice(prompt, tuple(choices), answer))
  return found


def copy(documents: Sequence[tuple[str, str]], count: int) -> list[Problem]:
  """Write three words again, after two examples of that."""
  found = []
  for _, text in documents:
    words = list(dict.fromkeys(re.findall(r'\b[A-Za-z]{2,9}\b', text)))
    for start in range(0, len(words) - 8, 9):
      threes = [' '.join(words[start + i : start + i + 3]) for i in (0, 3, 6)]
      shown = ''.join(f'{three} -> {three}\n' for three in threes[:2])
      prompt = f'{shown}{threes[2]} ->'
      found.append(Problem(prompt, threes[2], f' {threes[2]}', ('\n',)))
      if len(found) == count:
        return found
  return found


def arith(count: int) -> list[Problem]:
  """Sums of two numbers below 100, after two examples."""
  rng = np.random.default_rng(0)
  found = []
  for _ in range(count):
    pairs = rng.integers(100, size=(3, 2)).tolist()
    shown = ''.join(f'{a} + {b} = {a + b}\n' for a, b in pairs[:2])
    a, b = pairs[2]
    answer = str(a + b)
    prompt = f'{shown}{a} + {b} ='
    found.append(Problem(prompt, answer, f' {answer}', ('\n',)))
  return found


def gym(name: str, count: int):
  """(problems of a reasoning-gym generator, their checker).

  Raises:
    ConfigError: not installed, or no such generator.
  """
  try:
    import reasoning_gym  # an optional extra
  except ImportError as error:
    raise ConfigError(
      "eval.tasks: gym needs reasoning-gym: pip install 'gamma_jax[gym]'"
    ) from error
  try:
    data = reasoning_gym.create_dataset(name, size=count or COUNT, seed=0)
  except (ValueError, KeyError) as error:
    raise ConfigError(f'eval.tasks: {items_lib.GYM}:{name}: {error}') from error
  problems = [
    Problem(
      f'Question: {entry["question"]}\nAnswer:',
      entry,
      f' {entry["answer"]}',
      ('\n',),
    )
    for entry in data
  ]

  def check(text, entry):
    return data.score_answer(text.strip(), entry) >= 1

  return problems, check


def _cut(text: str) -> tuple[str, str]:
  """A beginning and what follows, cut before a space where there is one."""
  at = min(len(text) // 2, CONTEXT)
  space = text.rfind(' ', at // 2, at)
  at = space if space > 0 else at
  return text[:at], text[at : at + CONTINUATION]

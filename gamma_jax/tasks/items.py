"""What a task asks, and how the rows of published sets become that.

`read` takes a file; the plain functions below it take one raw row, from
wherever it comes (JSON lines, parquet, the hub, TFDS). Imports no JAX.

  format     fields of a row
  mcq        prompt, choices, answer (index): our own
  hellaswag  ctx or context, activity_label, endings, label
  piqa       goal, sol1, sol2, label
  arc        question, choices {text, label}, answerKey; or AI2's own file:
             question {stem, choices [{text, label}]}, answerKey
  ceval      question, A, B, C, D, answer (letter)
  cmmlu      Question, A, B, C, D, Answer (letter)
  gsm8k      question, answer (a solution, then `#### number`)
  math500    problem, solution, answer

In place of a file a set of the hub or of TFDS, as in data.source, with its
split: gsm8k:hf:openai/gsm8k,config=main,split=test, or
piqa:tfds:piqa,split=validation.
"""

from __future__ import annotations

import dataclasses
import gzip
import importlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gamma_jax.data import hub
from gamma_jax.errors import ConfigError

SYNTHETIC = ('synth_cloze', 'synth_copy', 'synth_arith')
GYM = 'gym'  # gym:NAME, a generator of reasoning-gym


@dataclasses.dataclass(frozen=True)
class Choice:
  """Which of `choices` goes on from `prompt`? Choices bring their space."""

  prompt: str
  choices: tuple[str, ...]
  answer: int  # index of the right one

  @property
  def solved(self) -> str:
    """The item as an example for others."""
    return self.prompt + self.choices[self.answer]


@dataclasses.dataclass(frozen=True)
class Problem:
  """Go on from `prompt` until one of `stop`; a checker reads what comes."""

  prompt: str
  answer: Any  # what the task's checker compares with
  solution: str  # a right text, for examples
  stop: tuple[str, ...]

  @property
  def solved(self) -> str:
    """The item as an example for others."""
    return self.prompt + self.solution


def hellaswag(row: Mapping[str, Any]) -> Choice:
  """2019, Zellers et al. (1905.07830); the context opens with its activity."""
  context = row['ctx'] if 'ctx' in row else row['context']
  prompt = _plain(f'{row["activity_label"]}: {context}')
  endings = tuple(f' {_plain(ending)}' for ending in row['endings'])
  return Choice(prompt, endings, int(row['label']))


def piqa(row: Mapping[str, Any]) -> Choice:
  """2019, Bisk et al. (1911.11641)."""
  choices = (f' {row["sol1"]}', f' {row["sol2"]}')
  return Choice(_question(row['goal']), choices, int(row['label']))


def arc(row: Mapping[str, Any]) -> Choice:
  """2018, Clark et al. (1803.05457)."""
  question, choices = row['question'], row.get('choices')
  if isinstance(question, Mapping):
    question, choices = question['stem'], question['choices']
  if isinstance(choices, Mapping):
    pairs = list(zip(choices['label'], choices['text'], strict=True))
  else:
    pairs = [(choice['label'], choice['text']) for choice in choices]
  labels = [label for label, _ in pairs]
  texts = tuple(f' {text}' for _, text in pairs)
  return Choice(_question(question), texts, labels.index(row['answerKey']))


def ceval(row: Mapping[str, Any]) -> Choice:
  """2023, Huang et al. (2305.08322); the choices are the letters."""
  return _letters(row['question'], row, row['answer'])


def cmmlu(row: Mapping[str, Any]) -> Choice:
  """2023, Li et al. (2306.09212); the choices are the letters."""
  return _letters(row['Question'], row, row['Answer'])


def mcq(row: Mapping[str, Any]) -> Choice:
  """A row with the fields of Choice."""
  return Choice(row['prompt'], tuple(row['choices']), int(row['answer']))


def gsm8k(row: Mapping[str, Any]) -> Problem:
  """2021, Cobbe et al. (2110.14168); calculator marks <<...>> are dropped."""
  solution = re.sub(r'<<.*?>>', '', row['answer'])
  answer = solution.rpartition('####')[2].strip()
  prompt = _question(row['question'])
  return Problem(prompt, answer, f' {solution}', ('\nQuestion:',))


def math500(row: Mapping[str, Any]) -> Problem:
  """2023, Lightman et al. (2305.20050), of MATH (2103.03874)."""
  prompt = f'Problem: {row["problem"]}\nSolution:'
  solution = f' {row["solution"]}'
  return Problem(prompt, row['answer'], solution, ('\nProblem:',))


FORMATS: dict[str, Callable[[Mapping[str, Any]], Choice | Problem]] = {
  f.__name__: f
  for f in (mcq, hellaswag, piqa, arc, ceval, cmmlu, gsm8k, math500)
}


def split(tasks: str) -> list[tuple[str, str]]:
  """'synth_cloze,gsm8k:FILE' -> [('synth_cloze', ''), ('gsm8k', 'FILE')].

  Raises:
    ConfigError: an unknown task, one without its file, or one named twice.
  """
  found: list[tuple[str, str]] = []
  # A comma also stands before an option (split=test) of a set of a hub.
  for spec in filter(None, re.split(r'\s*,\s*(?!\w+=)', tasks.strip())):
    kind, _, where = spec.partition(':')
    if bool(where) != (kind in FORMATS or kind == GYM) or (
      not where and kind not in SYNTHETIC
    ):
      raise ConfigError(
        f'eval.tasks: {spec!r} is not {", ".join(SYNTHETIC)}, {GYM}:NAME or '
        f'FORMAT:FILE (or hf:, tfds:) with a format of {", ".join(FORMATS)}'
      )
    if (kind, where) in found:
      raise ConfigError(f'eval.tasks: {spec!r} is there twice')
    found.append((kind, where))
  return found


def read(kind: str, path: str, count: int) -> list[Choice] | list[Problem]:
  """The first `count` items of a file or set (0: all), in its order.

  Raises:
    ConfigError: not there, not of this format, or without an item.
  """
  rows = _open(kind, path)
  items = []
  for number, row in enumerate(itertools.islice(rows, count or None), 1):
    try:
      items.append(_checked(FORMATS[kind](row)))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
      raise ConfigError(
        f'eval.tasks: row {number} of {path} is not of format {kind} '
        f'({type(error).__name__}: {error})'
      ) from error
  if not items:
    raise ConfigError(f'eval.tasks: {path} has no item')
  return items


def after(shown: str, item: Choice | Problem) -> Choice | Problem:
  """The item with text before its prompt."""
  return dataclasses.replace(item, prompt=shown + item.prompt)


def _checked(item: Choice | Problem) -> Choice | Problem:
  if not isinstance(item.prompt, str):
    raise TypeError('the prompt is not a string')
  if isinstance(item, Problem):
    return item
  if len(item.choices) < 2 or not all(c.strip() for c in item.choices):
    raise ValueError('needs two choices or more, none of them empty')
  if not 0 <= item.answer < len(item.choices):
    raise ValueError(f'the answer {item.answer} is none of the choices')
  return item


def _open(kind: str, path: str) -> Iterator[Mapping[str, Any]]:
  where, colon, name = path.partition(':')
  if colon and where in ('hf', 'tfds'):
    if not re.search(r',split=\w', name):
      raise ConfigError(
        f'eval.tasks: {path} needs its split: {path},split=test'
      )
    return map(_plain_row, hub.open_hub(where, name).rows())
  file = Path(path).expanduser()
  if not file.is_file():
    raise ConfigError(f'eval.tasks: {kind}: there is no file {file}')
  return _rows(file)


def _plain_row(value: Any) -> Any:
  """Rows of TFDS hold bytes and NumPy values; formats read Python's."""
  if isinstance(value, Mapping):
    return {key: _plain_row(v) for key, v in value.items()}
  if isinstance(value, bytes):
    return value.decode()
  if hasattr(value, 'tolist'):
    return _plain_row(value.tolist())
  return [_plain_row(v) for v in value] if isinstance(value, list) else value


def _rows(file: Path) -> Iterator[Mapping[str, Any]]:
  if file.suffix == '.parquet':
    try:
      parquet = importlib.import_module('pyarrow.parquet')
    except ImportError as error:
      raise ConfigError(
        f'reading {file} needs pyarrow: pip install pyarrow'
      ) from error
    for batch in parquet.ParquetFile(file).iter_batches():
      yield from batch.to_pylist()
    return
  with gzip.open(file) if file.suffix == '.gz' else file.open('rb') as lines:
    for number, line in enumerate(lines, 1):
      if line.strip():
        try:
          yield json.loads(line)
        except ValueError as error:
          raise ConfigError(
            f'eval.tasks: {file}:{number} is not JSON ({error})'
          ) from error


def _question(text: str) -> str:
  return f'Question: {text}\nAnswer:'


def _letters(question: str, row: Mapping[str, Any], answer: str) -> Choice:
  shown = ''.join(f'{letter}. {row[letter]}\n' for letter in 'ABCD')
  choices = tuple(f' {letter}' for letter in 'ABCD')
  return Choice(
    f'题目：{question}\n{shown}答案：', choices, 'ABCD'.index(answer)
  )


def _plain(text: str) -> str:
  """Without the marks that its WikiHow part is full of."""
  text = re.sub(r'\[.*?\]', '', text.replace(' [title]', '. '))
  return re.sub(r' +', ' ', text).strip()

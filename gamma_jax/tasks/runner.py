"""The tasks that a config asks for: load, run, show.

Loading comes first and finds what is wrong before a model is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gamma_jax import program as program_lib
from gamma_jax import train_step
from gamma_jax.config import Config
from gamma_jax.data import anchor, pipeline
from gamma_jax.data import tokenizer as tokenizer_lib
from gamma_jax.errors import ConfigError
from gamma_jax.tasks import answers, choice, generation, items, synthetic

RATES = ('acc', 'acc_norm', 'pass')


class Task(NamedTuple):
  """Items under the name that the user gave."""

  name: str
  items: Sequence[items.Choice] | Sequence[items.Problem]
  check: Callable[[str, Any], bool] | None  # None: multiple choice


def load(config: Config) -> list[Task]:
  """Reads or makes the items of every task of `eval.tasks`.

  Raises:
    ConfigError: a task that cannot be had here.
  """
  asked = items.split(config.eval.tasks)
  if asked and config.data.source == anchor.SOURCE:
    raise ConfigError(
      f'eval.tasks asks for text, of which data.source={anchor.SOURCE} has none'
    )
  return [_load(config, kind, where) for kind, where in asked]


def run(
  config: Config,
  tasks: Sequence[Task],
  program: program_lib.Program,
  weights: tuple,
) -> tuple[dict[str, dict], dict[str, list[dict]]]:
  """({task: numbers}, {task: one line an item}) of (params, moe_state)."""
  params, moe_state = weights
  h = train_step.hyper(config)
  tokenizer = tokenizer_lib.load_tokenizer(config.data.tokenizer)

  def nll(batch):
    put = program.put_batch(batch)
    return np.asarray(program.evaluate(params, h, put, moe_state))

  writer = generation.Writer(config, program, weights, tokenizer)
  numbers, lines = {}, {}
  for name, asked, check in tasks:
    if check is None:
      scores = choice.score(
        asked,
        tokenizer,
        nll,
        seq_len=config.train.seq_len,
        batch_size=config.eval.batch_size,
      )
      numbers[name] = choice.summarize(asked, scores)
      lines[name] = [
        {'answer': item.answer, 'logprob': s.logprob.tolist()}
        for item, s in zip(asked, scores, strict=True)
      ]
    else:
      written = writer.write(asked, name.partition(':')[0])
      numbers[name], right = generation.summarize(asked, written, check)
      numbers[name]['new_tokens'] = writer.new_tokens
      lines[name] = [
        {'right': r, 'text': w.text, 'ended': w.ended}
        for r, w in zip(right, written, strict=True)
      ]
  return numbers, lines


def rates(numbers: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
  """Shares and the ends of their intervals as metrics: tasks/TASK/acc, ..."""
  return {
    f'tasks/{task}/{rate}{end}': found[f'{rate}{end}']
    for task, found in numbers.items()
    for rate in RATES
    if rate in found
    for end in ('', '_low', '_high')
  }


def table(cells: Mapping[str, Mapping[str, Any]]) -> str:
  """Text of the eval.json of every cell, by cell id."""
  rows = [('cell', 'what', 'value', '95 % interval', 'items')]
  for cell, found in cells.items():
    m = found['metrics']
    for source in sorted(k for k in m if k.startswith('heldout/loss')):
      if 'stderr' in source:
        continue
      suffix = source.removeprefix('heldout/loss')
      half = 1.96 * m.get(f'heldout/loss_stderr{suffix}', math.nan)
      interval = f'{m[source] - half:.4f} .. {m[source] + half:.4f}'
      documents = str(m.get(f'heldout/documents{suffix}', ''))
      rows.append((cell, source, f'{m[source]:.4f}', interval, documents))
      if (bits := f'heldout/bits_per_byte{suffix}') in m:
        rows.append((cell, bits, f'{m[bits]:.4f}', '', documents))
    for task, t in found.get('tasks', {}).items():
      for rate in (r for r in RATES if r in t):
        interval = f'{t[f"{rate}_low"]:.3f} .. {t[f"{rate}_high"]:.3f}'
        what = f'{task} {rate}'
        if 'chance' in t:
          what += f' (chance {t["chance"]:.2f})'
        rows.append((cell, what, f'{t[rate]:.3f}', interval, str(t['items'])))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = (
    '  '.join(f'{text:{w}}' for text, w in zip(row, widths, strict=True))
    for row in rows
  )
  return ''.join(f'{line.rstrip()}\n' for line in lines)


def _load(config: Config, kind: str, where: str) -> Task:
  tokenizer = tokenizer_lib.load_tokenizer(config.data.tokenizer)
  count, shots = config.eval.max_items, config.eval.shots
  count = count and count + shots
  check = _CHECKS.get(kind)
  if kind == 'math500':
    answers.need_math_verify()
  if kind == items.GYM:
    asked, check = synthetic.gym(where, count)
  elif kind in items.SYNTHETIC:
    documents = [
      (part, tokenizer.decode(ids).decode('utf-8', 'replace'))
      for part, ids in pipeline.heldout_documents(config.data)
    ]
    asked = synthetic.make(kind, documents, count)
  else:
    asked = items.read(kind, where, count)
  name = f'{kind}:{where}' if where else kind
  return Task(name, _after(asked, shots, name), check)


_CHECKS = {
  'synth_copy': answers.exact,
  'synth_arith': answers.exact,
  'gsm8k': answers.number,
  'math500': answers.expression,
}


def _after(asked: Sequence, shots: int, name: str) -> list:
  """All items but the first `shots`, which are shown, solved, before each."""
  if len(asked) <= shots:
    raise ConfigError(
      f'eval.shots={shots} leaves none of the {len(asked)} items of {name}'
    )
  shown = ''.join(f'{item.solved}\n\n' for item in asked[:shots])
  return [items.after(shown, item) for item in asked[shots:]]

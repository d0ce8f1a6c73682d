"""Compares two trained cells, token by token, on the same held-out text.

  python -m gamma_jax.tokens CELL_A CELL_B --out=DIR [--documents=N]
    [--bins=20] [--step_a=N] [--step_b=N] [--parquet]

A cell is its folder, `<workdir>/<cell id>`. Both must have read the same data
with the same tokenizer and train.seq_len; their models may differ in shape. To
compare two checkpoints of one cell, name it twice and give two steps.

One sign everywhere: above 0, a is better. DIR gets
  index.html  what was found, and the tokens that differ most, shaded
  bins.csv    gaps by difficulty and by token frequency, 95 % intervals by
              document
  rows/       doc, position, token id, nll_a and nll_b of every token (npz)
  tokens.parquet  the same columns, with --parquet
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from gamma_jax import (
  configure,
  evaluate,
  files,
  platforms,
  sharding,
  token_page,
  token_rows,
  train_step,
  trained,
)
from gamma_jax import program as program_lib
from gamma_jax.analysis import token_examples, token_gap
from gamma_jax.config import Config, MeshConfig
from gamma_jax.data import anchor, pipeline
from gamma_jax.data import prepare as prepare_lib
from gamma_jax.data import tokenizer as tokenizer_lib
from gamma_jax.errors import ConfigError

EXAMPLES, BEFORE, AFTER = 20, 60, 20  # of the page; tokens of context
MOST_BINS = 1000


def compare(
  a: trained.Trained,
  b: trained.Trained,
  out: Path,
  *,
  documents: int = 0,
  bins: int = 20,
  parquet: bool = False,
) -> token_gap.TokenGap:
  """Scores both models and writes the files of `out`.

  Args:
    a: one model.
    b: the other.
    out: a folder that is empty or not there.
    documents: the first so many held-out documents; 0: all.
    bins: quantile bins of difficulty.
    parquet: write tokens.parquet too.

  Raises:
    ConfigError: the cells cannot be compared, `out` holds something, or
      pyarrow is missing.
    ValueError: an NLL is not finite.
  """
  files.check_empty(out)
  check_comparable(a.config, b.config)
  if parquet:
    token_rows.need_parquet()
  tokenizer = tokenizer_lib.load_tokenizer(a.config.data.tokenizer)
  sources = pipeline.heldout_sources(a.config.data)
  scored = _score(a, b, documents)
  rows = token_rows.write(out / 'rows', scored)
  if parquet:
    token_rows.to_parquet(rows, out / 'tokens.parquet')
  gap = token_gap.analyse(
    rows, documents=len(sources), vocab_size=tokenizer.vocab_size, bins=bins
  )
  files.write_text(out / 'bins.csv', bins_csv(gap))
  gaining, losing = token_examples.extremes(
    rows,
    count=EXAMPLES,
    before=BEFORE,
    after=AFTER,
    window=a.config.train.seq_len,
  )
  names = _names(a, b)
  page = token_page.page(
    names, gap, (gaining, losing), tokenizer, sources, a.config.train.seq_len
  )
  files.write_text(out / 'index.html', page)
  return gap


def check_comparable(a: Config, b: Config) -> None:
  """Raises ConfigError unless both score the same tokens, cut alike."""
  if anchor.SOURCE in (a.data.source, b.data.source):
    raise ConfigError(
      f'a cell has data.source={anchor.SOURCE}, which has no held-out text'
    )
  if a.train.seq_len != b.train.seq_len:
    raise ConfigError(
      f'the cells differ in train.seq_len ({a.train.seq_len} and '
      f'{b.train.seq_len}), so their tokens have different contexts'
    )
  ids = [
    tokenizer_lib.load_tokenizer(c.data.tokenizer).fingerprint for c in (a, b)
  ]
  if ids[0] != ids[1]:
    raise ConfigError(
      f'the cells differ in data.tokenizer ({a.data.tokenizer} and '
      f'{b.data.tokenizer}), so their tokens are not the same'
    )
  # The name is a fingerprint of source, tokenizer and what is held out.
  data = [prepare_lib.prepare(c.data).name for c in (a, b)]
  if data[0] != data[1]:
    raise ConfigError(
      f'the cells differ in their data ({data[0]} and {data[1]}: data.source '
      'or data.heldout_percent), so they hold out different documents'
    )


def bins_csv(gap: token_gap.TokenGap) -> str:
  """One line a bin; the columns are those of token_gap.Bin."""
  text = io.StringIO()
  table = csv.writer(text, lineterminator='\n')
  header = ['by', 'bin']
  for field in dataclasses.fields(token_gap.Bin):
    header.append(field.name)
    if field.name in ('gain', 'delta_sym'):
      header += [f'{field.name}_low', f'{field.name}_high']
  table.writerow(header)
  for by, bins in (
    ('all', [gap.overall]),
    ('difficulty', gap.difficulty),
    ('frequency', gap.frequency),
  ):
    for number, one in enumerate(bins):
      line = [by, number]
      for value in dataclasses.astuple(one):
        line += value if isinstance(value, tuple) else [value]
      table.writerow(line)
  return text.getvalue()


def _score(
  a: trained.Trained, b: trained.Trained, documents: int
) -> Iterator[token_gap.Block]:
  batch_size = a.config.eval.batch_size
  nll_a, nll_b = _nll(a, batch_size), _nll(b, batch_size)
  batches = pipeline.eval_batches(
    a.config.data,
    seq_len=a.config.train.seq_len,
    batch_size=batch_size,
    documents=documents,
  )
  done = 0
  for number, batch in enumerate(batches):
    inputs = evaluate.model_inputs(batch)
    block = token_rows.from_batch(batch, nll_a(inputs), nll_b(inputs))
    done += len(block.doc)
    if number % 100 == 0:
      logging.info('%d tokens scored', done)
    yield block


def _nll(one: trained.Trained, batch_size: int) -> Callable:
  """Batch of [B, T] arrays -> NLL [B, T] in nats."""
  config, devices = _placed(one.config, batch_size)
  program = program_lib.build(configure.program_key(config), devices)
  where = jax.tree.map(lambda x: x.sharding, program.abstract_state)
  params = jax.device_put(one.params, where.params)
  moe_state = jax.device_put(one.moe_state, where.moe_state)
  h = train_step.hyper(config)
  return lambda batch: np.asarray(
    program.evaluate(params, h, program.put_batch(batch), moe_state)
  )


def _placed(config: Config, batch_size: int):
  """The mesh that the cell trained on if there is one, else one device."""
  config = configure.replace_by_path(config, 'eval.batch_size', batch_size)
  devices = sharding.devices_for(config.mesh)
  try:
    configure.check_devices(config, len(devices))
  except ConfigError:
    config = dataclasses.replace(config, mesh=MeshConfig())
    devices = tuple(jax.devices()[:1])
  return config, devices


def _names(a: trained.Trained, b: trained.Trained) -> tuple[str, str]:
  """What tells the two apart, as short as that can be."""
  folders = [one.folder.resolve() for one in (a, b)]
  names = [folder.name for folder in folders]
  if names[0] == names[1]:
    names = [f'{folder.parent.name}/{folder.name}' for folder in folders]
  return tuple(
    f'{name}, step {one.step}' for name, one in zip(names, (a, b), strict=True)
  )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog='python -m gamma_jax.tokens',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('a', metavar='CELL_A', type=Path)
  parser.add_argument('b', metavar='CELL_B', type=Path)
  parser.add_argument('--out', type=Path, required=True, help='a new folder')
  parser.add_argument(
    '--documents', type=int, default=0, help='the first N held out; 0: all'
  )
  parser.add_argument(
    '--bins', type=int, default=20, help='quantile bins of difficulty'
  )
  parser.add_argument(
    '--parquet', action='store_true', help='every token as Parquet, too'
  )
  for arm in 'ab':
    parser.add_argument(
      f'--step_{arm}', type=int, help=f'checkpoint of {arm}; default: newest'
    )
  return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  logging.basicConfig(format='%(message)s', level=logging.INFO, force=True)
  logging.getLogger('absl').setLevel(logging.ERROR)  # orbax is talkative
  args = _parse(argv)
  try:
    if not 1 <= args.bins <= MOST_BINS:
      raise ConfigError(f'--bins={args.bins} is not in [1, {MOST_BINS}]')
    if args.documents < 0:
      raise ConfigError(f'--documents={args.documents} is below 0')
    files.check_empty(args.out)
    config = trained.read_config(args.a)
    check_comparable(config, trained.read_config(args.b))
    platforms.cache_compiles(config.compile_cache)
    print(platforms.choose(config.platform), flush=True)
    gap = compare(
      trained.load(args.a, args.step_a),
      trained.load(args.b, args.step_b),
      args.out,
      documents=args.documents,
      bins=args.bins,
      parquet=args.parquet,
    )
  except ConfigError as error:
    print(f'error: {error}', file=sys.stderr)
    return error.exit_code
  print(token_page.headline(gap))
  print(args.out / 'index.html')
  return 0


if __name__ == '__main__':
  sys.exit(main())

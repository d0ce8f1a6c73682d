"""Prepares a corpus by hand, so that no run has to wait for it.

python -m gamma_jax.data --source=sample --tokenizer=bpe4k
python -m gamma_jax.data --source='jsonl:/corpus/*.jsonl' --tokenizer=my.json
python -m gamma_jax.data --source='jsonl:/a/*.jsonl+parquet:/b/*.parquet'
python -m gamma_jax.data train-tokenizer --source='jsonl:/corpus/*.jsonl' \\
  --vocab_size=16384 --out=my.json
python -m gamma_jax.data offline-bi   # fetches packages, see offline_bi.py
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import rich.console
import rich.table

from gamma_jax import errors
from gamma_jax.config import DataConfig
from gamma_jax.data import offline_bi, sources, tokenizer, workers
from gamma_jax.data import prepare as prepare_lib


def main(argv: list[str] | None = None) -> int:
  """Returns the exit code."""
  argv = sys.argv[1:] if argv is None else argv
  if argv[:1] == ['train-tokenizer']:
    return _train(argv[1:])
  offline = argv[:1] == ['offline-bi']
  argv = argv[offline:]
  data = DataConfig()
  parser = argparse.ArgumentParser(
    prog='python -m gamma_jax.data', description=__doc__.splitlines()[0]
  )
  parser.add_argument('--source', default=data.source, help=sources.KINDS)
  parser.add_argument(
    '--tokenizer', default=data.tokenizer, help='bpe4k, bytes or a file'
  )
  parser.add_argument('--dir', default=data.dir)
  parser.add_argument(
    '--heldout_percent', type=float, default=data.heldout_percent
  )
  parser.add_argument(
    '--processes',
    type=int,
    help=f'how many encode; default: one a core, at most {workers.MOST}',
  )
  args = vars(parser.parse_args(argv))
  processes = args.pop('processes')
  try:
    data = DataConfig(**args)
    if offline:
      corpus = Path(data.dir).expanduser() / 'offline-bi'
      offline_bi.show(offline_bi.build(corpus))
      data = dataclasses.replace(
        data,
        source=f'jsonl:{corpus}/*.jsonl',
        tokenizer=str(corpus / 'bpe16k.json'),
      )
    folder = prepare_lib.prepare(data, processes)
  except errors.ConfigError as error:
    print(error, file=sys.stderr)
    return error.exit_code
  table = rich.table.Table('part', 'split')
  for column in ('documents', 'tokens', 'bytes'):
    table.add_column(column, justify='right')
  manifest = prepare_lib.read_manifest(folder)
  for split, counts in manifest['splits'].items():
    for part, count in counts.items():
      table.add_row(part, split, *(f'{n:,}' for n in count.values()))
  console = rich.console.Console()
  console.print(table)
  for split, count in manifest['duplicates'].items():
    print(f'{count:,} exact duplicates in {split}; counted, not dropped')
  if manifest['changed']:
    print(f'{manifest["changed"]:,} documents are changed by the tokenizer')
  print(folder)
  if offline:
    print(f"--config.data.source='{data.source}' \\")
    print(f'  --config.data.tokenizer={data.tokenizer}')
  return 0


def _train(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(
    prog='python -m gamma_jax.data train-tokenizer'
  )
  parser.add_argument('--source', default='sample', help=sources.KINDS)
  parser.add_argument('--vocab_size', type=int, default=16384)
  parser.add_argument('--out', required=True, help='the JSON file to write')
  args = parser.parse_args(argv)
  try:
    source = sources.open_source(args.source, tokenizer.load_tokenizer('bytes'))
    texts = (document.text for document in source.documents())
    trained = tokenizer.train_bpe(
      (t if isinstance(t, str) else t.decode(errors='replace') for t in texts),
      args.vocab_size,
      args.out,
    )
  except errors.ConfigError as error:
    print(error, file=sys.stderr)
    return error.exit_code
  print(f'{args.out}: {trained.vocab_size} ids')
  return 0


if __name__ == '__main__':
  sys.exit(main())

"""How the weights of trained cells are aligned, from their checkpoints alone.

  python -m gamma_jax.condense CELL [CELL ...] --out=DIR

A cell is its folder, `<workdir>/<cell id>`, or the `checkpoints` in it. Every
complete checkpoint is read (`checkpoint.keep_every` keeps more of them). DIR
gets
  condensation.csv  every matrix of every layer at every checkpoint
  trajectories.png  stable rank and mean |cosine| against updates
  cosines-N.png     cell N: cosines of the neurons of one layer, ordered by
                    the leading eigenvector, at up to five checkpoints

Effective rank and clusters are exact here (float64, all neurons); during
training `log.mechanics` writes what is cheap (mechanics.py).
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gamma_jax import files, init_rules, layers, model, platforms, trained
from gamma_jax.analysis import condensation, condensation_tree
from gamma_jax.config import Config
from gamma_jax.errors import ConfigError

KINDS = ('q', 'k', 'v', 'o', 'gate', 'up', 'mlp_gate', 'down')
SHOWN = ('q', 'v', 'o', 'up', 'down')  # kinds in the pictures of cosines
MOST_STEPS = 5

Matrices = Mapping[str, np.ndarray]  # kind -> [*batch, d_out, d_in]
_metrics = jax.jit(condensation.matrix_metrics)


def matrices(config: Config, params: Mapping[str, Any]) -> dict[str, Matrices]:
  """Label -> float32 [L, ..., d_out, d_in] or [d_out, d_in], rows neurons."""
  rule = init_rules.make_rule(config.init, config.model)
  boxed = model.abstract_params(config.model, rule)
  declarations = layers.declarations(boxed)
  names = condensation_tree.labels(declarations)
  out = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = '/'.join(p.key for p in path)
    if name in names:
      axes = condensation_tree.declared_axes(
        declarations[name], leaf.shape, name
      )
      out[names[name]] = np.asarray(
        condensation.as_matrix(np.asarray(leaf, np.float32), axes)
      )
  return out


def rows_of(cell: str, step: int, stacks: Matrices) -> Iterator[dict]:
  """One row a matrix; experts are numbered within their layer."""
  for label, stack in stacks.items():
    for at in np.ndindex(stack.shape[:-2]):
      w = stack[at]
      values = {k: float(v) for k, v in _metrics(w).items()}
      yield {
        'cell': cell,
        'step': step,
        'matrix': label,
        'layer': at[0] if at else '',
        'expert': at[1] if len(at) > 1 else '',
        'd_out': w.shape[0],
        'd_in': w.shape[1],
        **values,
        'stable_rank_random': condensation.random_stable_rank(*w.shape),
        'mean_abs_cosine_random': condensation.random_mean_abs_cosine(
          w.shape[1]
        ),
        'effective_rank': float(condensation.effective_rank(w)),
        'component_share': condensation.largest_component_share(w),
      }


def analyse(cells: Sequence[Path], out: Path) -> list[dict]:
  """Writes the files of `out`; returns the rows of the table.

  Raises:
    ConfigError: a folder is no cell or has no checkpoint, `out` holds
      something, or plots are not installed.
  """
  files.check_empty(out)
  try:
    from gamma_jax import condense_plot
  except ImportError as error:
    raise ConfigError(
      f'{error}; plots need: pip install gamma_jax[report]'
    ) from error
  places = [trained.checkpoints(cell) for cell in cells]
  table: list[dict] = []
  for number, (cell, (_, _, steps)) in enumerate(
    zip(cells, places, strict=True), start=1
  ):
    shown = set(spread(steps, MOST_STEPS))
    pictures = {}
    for step in steps:
      found = trained.load(cell, step)
      stacks = matrices(found.config, found.params)
      table += rows_of(cell.name, step, stacks)
      if step in shown:
        pictures[step] = middle_cosines(stacks)
    condense_plot.cosines(cell.name, pictures, out / f'cosines-{number}.png')
  files.write_text(out / 'condensation.csv', as_csv(table))
  condense_plot.trajectories(table, out / 'trajectories.png')
  return table


def middle_cosines(stacks: Matrices) -> dict[str, np.ndarray]:
  """Kind -> ordered cosines of its matrix in the middle layer."""
  return {
    kind: condensation.ordered_cosines(stacks[kind][len(stacks[kind]) // 2])
    for kind in SHOWN
    if kind in stacks
  }


def spread(steps: Sequence[int], most: int) -> list[int]:
  """At most `most` of `steps`: both ends, and evenly between them in order."""
  index = np.linspace(0, len(steps) - 1, min(most, len(steps)))
  return [steps[i] for i in np.unique(np.round(index).astype(int))]


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
  """A header and a line a row."""
  columns = list(dict.fromkeys(name for row in rows for name in row))
  text = io.StringIO()
  writer = csv.DictWriter(text, columns, restval='', lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  return text.getvalue()


def _cell(text: str) -> Path:
  path = Path(text).expanduser().resolve()
  return path.parent if path.name == 'checkpoints' else path


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code: 0 done, 2 bad input."""
  parser = argparse.ArgumentParser(
    prog='python -m gamma_jax.condense',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('cells', nargs='+', type=_cell, metavar='CELL')
  parser.add_argument('--out', type=Path, required=True)
  args = parser.parse_args(argv)
  try:
    platforms.cache_compiles(Config().compile_cache)
    analyse(args.cells, args.out)
  except ConfigError as error:
    print(f'error: {error}', file=sys.stderr)
    return error.exit_code
  print(f'wrote {args.out}')
  return 0


if __name__ == '__main__':
  sys.exit(main())

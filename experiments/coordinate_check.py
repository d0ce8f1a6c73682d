"""Does width act on the model as sigma = d_in^-gamma says it should?

Real models of growing width D are drawn at several gamma; log size against
log D has a slope that theory gives (arXiv 2606.17945, residual flow):

  RMS(attention branch) / RMS(embedding)     1 - gamma
  RMS(MLP branch) / RMS(embedding), GELU     1 - gamma
                                    SwiGLU   3/2 - 2 gamma
  std of the logits                          1/2 - gamma

A matrix whose std is off by a power of D moves a slope by that power, which a
test at one width cannot see. Branches are those of the first block, over the
embedding and not over their own input: at gamma 1/2 the attention branch
outgrows the embedding and would hide the exponent of the MLP. A few Adam steps
then show how long the start lasts.

Run: python -m experiments.coordinate_check --workdir=runs/coordinate_check
(CPU, a few minutes; exit code 1 when a slope is off)
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import io
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich
import rich.progress
import rich.table
import scipy.stats

from experiments import coordinate_plot
from gamma_jax import config as config_lib
from gamma_jax import configure, files, metrics, model, provenance, train_step
from gamma_jax import program as program_lib
from gamma_jax.data import sources, tokenizer

HEAD_DIM = 64
VOCAB = 512
BATCH, LENGTH = 4, 64
MLPS = ('gelu', 'swiglu')
# Columns of measurements.csv. The final stream adds up parts of unlike slope,
# so theory gives no power law and nothing is checked.
QUANTITIES = ('attention_flow', 'mlp_flow', 'logits_std', 'final_rms')

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Slope:
  """d log(quantity) / d log(D) at step 0 for one MLP kind and gamma.

  Attributes:
    slope: fitted over widths x seeds.
    margin: half the 95 % t-interval of the regression.
    intercept: of the fit, natural logs.
    expected: by theory; None where it gives no power law.
    ok: within tolerance; None where nothing is expected.
  """

  quantity: str
  mlp: str
  gamma: float
  slope: float
  margin: float
  intercept: float
  expected: float | None
  ok: bool | None


def expected_slope(quantity: str, mlp: str, gamma: float) -> float | None:
  """The exponent of D, or None where theory gives no power law."""
  match quantity, mlp:
    case 'logits_std', _:
      return 0.5 - gamma
    case ('attention_flow', _) | ('mlp_flow', 'gelu'):
      return 1 - gamma
    case 'mlp_flow', 'swiglu':
      return 1.5 - 2 * gamma
  return None


def fit(rows: Sequence[Row], tolerance: float) -> list[Slope]:
  """Slopes at step 0, one for each quantity, MLP kind and gamma in `rows`."""
  first = [row for row in rows if row['step'] == 0]
  arms = sorted({(row['mlp'], row['gamma']) for row in first})
  slopes = []
  for quantity, (mlp, gamma) in itertools.product(QUANTITIES, arms):
    arm = [r for r in first if (r['mlp'], r['gamma']) == (mlp, gamma)]
    line = scipy.stats.linregress(
      np.log([row['width'] for row in arm]),
      np.log([row[quantity] for row in arm]),
    )
    wide = scipy.stats.t.ppf(0.975, len(arm) - 2) * line.stderr
    expected = expected_slope(quantity, mlp, gamma)
    ok = None
    if expected is not None:
      ok = bool(abs(line.slope - expected) <= tolerance)
    numbers = (float(line.slope), float(wide), float(line.intercept))
    slopes.append(Slope(quantity, mlp, gamma, *numbers, expected, ok))
  return slopes


def cell(
  args: argparse.Namespace, width: int, mlp: str, gamma: float, seed: int
) -> config_lib.Config:
  """The configuration of one model; F is 4 D, or 8/3 D in steps of 64."""
  F = 4 * width if mlp == 'gelu' else round(8 * width / 3 / 64) * 64
  heads = width // HEAD_DIM
  return config_lib.Config(
    seed=seed,
    model=config_lib.ModelConfig(
      D=width, F=F, L=2, N=heads, K=heads, H=HEAD_DIM, V=VOCAB, mlp=mlp,
      gate=args.gate, norm_eps=1e-12, dtype=args.dtype,
      param_dtype=args.param_dtype,
    ),
    init=config_lib.InitConfig(gamma=gamma),
    # No warm-up and no decay: every update is worth lr, so that the number of
    # updates which a start survives can be read off.
    opt=config_lib.OptConfig(
      lr=args.lr, warmup_steps=0, schedule='constant', weight_decay=0.0
    ),
    train=config_lib.TrainConfig(
      steps=max(args.steps, 1), batch_size=BATCH, seq_len=LENGTH
    ),
  )  # fmt: skip


def token_batch() -> dict[str, np.ndarray]:
  """Bytes of the first documents of the sample, one a row: [BATCH, LENGTH+1].

  The same for every width, gamma and seed, so it moves no slope.
  """
  to_ids = tokenizer.load_tokenizer('bytes')
  ids = (
    to_ids.encode(document.text)[: LENGTH + 1]
    for document in sources.open_source('sample', to_ids).documents()
  )
  long_enough = (row for row in ids if len(row) == LENGTH + 1)
  tokens = np.stack(list(itertools.islice(long_enough, BATCH)))
  places = np.arange(LENGTH + 1, dtype=np.int32)
  return {
    'tokens': tokens.astype(np.int32),
    'segment_ids': np.ones(tokens.shape, np.int32),
    'positions': np.broadcast_to(places, tokens.shape),
  }


@functools.lru_cache(maxsize=1)
def _compile(config: config_lib.Config):
  """The program of one shape, and jitted measure and ratios."""
  program = program_lib.build(config, (jax.devices()[0],))
  role_of = metrics.roles(program.declarations)
  return (
    program,
    program.in_mesh(jax.jit(functools.partial(_measure, config))),
    program.in_mesh(jax.jit(functools.partial(_ratios, role_of))),
  )


def _measure(config: config_lib.Config, params, h: train_step.Hyper, batch):
  """QUANTITIES of one set of parameters, as float32 scalars."""
  batch = train_step.split_labels(batch)
  (hidden, head), seen = train_step.transformer(config).apply(
    {'params': params},
    batch['inputs'],
    batch['segment_ids'],
    batch['positions'],
    h.norm_eps,
    mutable=[model.PROBE],
  )
  probe = seen[model.PROBE]
  first = {name: layers[0] for name, layers in probe['blocks'].items()}
  embedding = first['attn_stream_ms']
  logits = hidden.astype(jnp.float32) @ head.astype(jnp.float32)
  return {
    'attention_flow': jnp.sqrt(first['attn_branch_ms'] / embedding),
    'mlp_flow': jnp.sqrt(first['mlp_branch_ms'] / embedding),
    'logits_std': jnp.std(logits),
    'final_rms': jnp.sqrt(probe['final_stream_ms']),
  }


def _ratios(role_of: dict[str, str], new, old):
  """RMS(update) / RMS(parameters before it), by role."""
  update = jax.tree.map(
    lambda a, b: a.astype(jnp.float32) - b.astype(jnp.float32), new, old
  )
  moved = metrics.rms_by_role(update, role_of)
  sizes = metrics.rms_by_role(old, role_of)
  return {f'update_{r}': moved[r] / sizes[r] for r in sizes if r != 'norm'}


def run_cell(config: config_lib.Config, batch, steps: int) -> Iterator[Row]:
  """Yields the row of step 0 and one after each update."""
  program, measure, ratios = _compile(configure.program_key(config))
  h = train_step.hyper(config)
  batch = program.put_batch(batch)
  what = {
    'mlp': config.model.mlp,
    'width': config.model.D,
    'gamma': config.init.gamma,
    'seed': config.seed,
  }
  state = program.init(config)
  moved = {}
  for step in range(steps + 1):
    if step:
      old = jax.tree.map(jnp.copy, state.params)  # `step` donates its state
      state, _ = program.step(state, h, batch)
      moved = ratios(state.params, old)
    seen = jax.device_get(measure(state.params, h, batch) | moved)
    yield what | {'step': step} | {k: float(v) for k, v in seen.items()}


def run_all(args: argparse.Namespace) -> list[Row]:
  """All cells, those of one shape after one another: one compile each."""
  grid = list(
    itertools.product(args.widths, args.mlps, args.gammas, args.seeds)
  )
  batch, rows = token_batch(), []
  for point in rich.progress.track(grid, 'models'):
    rows += run_cell(cell(args, *point), batch, args.steps)
  return rows


def _cells(slope: Slope) -> list[str]:
  expected = '-' if slope.expected is None else f'{slope.expected:+.2f}'
  verdict = {True: 'pass', False: 'FAIL', None: '-'}[slope.ok]
  fitted = f'{slope.slope:+.3f} ± {slope.margin:.3f}'
  return [
    slope.quantity, slope.mlp, f'{slope.gamma:g}', expected, fitted, verdict
  ]  # fmt: skip


HEADINGS = ['quantity', 'mlp', 'gamma', 'expected', 'fitted ± 95 %', 'verdict']


def rich_table(slopes: Sequence[Slope]) -> rich.table.Table:
  """The slopes for a terminal."""
  table = rich.table.Table(title='d log(quantity) / d log(D) at step 0')
  for heading in HEADINGS:
    table.add_column(heading)
  for slope in slopes:
    style = 'bold red' if slope.ok is False else None
    table.add_row(*_cells(slope), style=style)
  return table


def markdown_table(slopes: Sequence[Slope]) -> str:
  """The slopes as Markdown."""
  lines = [HEADINGS, ['---'] * len(HEADINGS), *map(_cells, slopes)]
  return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def verdict(slopes: Sequence[Slope], tolerance: float) -> str:
  """One sentence."""
  checked = [s for s in slopes if s.ok is not None]
  failed = [s for s in checked if not s.ok]
  worst = max(checked, key=lambda s: abs(s.slope - s.expected))
  return (
    f'{len(checked) - len(failed)} of {len(checked)} slopes within'
    f' {tolerance:g} of theory; the farthest is {worst.quantity}, {worst.mlp},'
    f' gamma {worst.gamma:g}: {worst.slope:+.3f} against {worst.expected:+.2f}'
  )


def write(workdir: Path, rows: Sequence[Row], slopes: Sequence[Slope]) -> None:
  """measurements.csv, slopes.csv and slopes.md."""
  _write_csv(workdir / 'measurements.csv', rows)
  _write_csv(workdir / 'slopes.csv', [dataclasses.asdict(s) for s in slopes])
  files.write_text(workdir / 'slopes.md', markdown_table(slopes))


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
  columns = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
  text = io.StringIO()
  writer = csv.DictWriter(text, columns, lineterminator='\n')
  writer.writeheader()
  for row in rows:
    writer.writerow(
      {k: f'{v:.6g}' if isinstance(v, float) else v for k, v in row.items()}
    )
  files.write_text(path, text.getvalue())


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
  """Reads the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add('--workdir', type=Path, required=True, help='where results are written')
  several = {'nargs': '+', 'metavar': 'X'}
  add('--widths', type=int, default=[128, 256, 512, 1024], **several)
  add('--mlps', choices=MLPS, default=list(MLPS), nargs='+')
  add('--gammas', type=float, default=[0.5, 0.75, 1.0, 1.25], **several)
  add('--seeds', type=int, default=[0, 1, 2], **several)
  add('--steps', type=int, default=4, help='Adam updates to follow')
  add('--lr', type=float, default=1e-3)
  add('--gate', default='none', choices=['none', 'headwise', 'elementwise'])
  for name in ('--dtype', '--param_dtype'):
    add(name, default='float32', choices=['float32', 'bfloat16'])
  add('--tolerance', type=float, default=0.05, help='on each slope')
  add('--quick', action='store_true', help='small models, tolerance 0.1')
  args = parser.parse_args(argv)
  if args.quick:
    args.widths, args.seeds, args.steps = [64, 128, 256], [0, 1, 2], 0
    args.tolerance = 0.1  # few units: more noise, and F is rounded coarsely
  whole = all(w > 0 and w % HEAD_DIM == 0 for w in args.widths)
  if len(set(args.widths)) < 3 or not whole:
    parser.error(f'--widths: give three or more multiples of {HEAD_DIM}')
  return args


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the grid, writes and draws; returns the exit code."""
  args = parse(argv)
  args.workdir.mkdir(parents=True, exist_ok=True)
  run = {
    'command': sys.orig_argv,
    'versions': provenance.versions(),
    'devices': provenance.devices(),
    'git': provenance.git_state(),
  }
  files.write_json(args.workdir / 'run.json', run)
  rows = run_all(args)
  slopes = fit(rows, args.tolerance)
  write(args.workdir, rows, slopes)
  png = args.workdir / 'coordinate_check.png'
  coordinate_plot.plot_slopes(rows, slopes, png)
  if args.steps:
    png = args.workdir / 'first_steps.png'
    coordinate_plot.plot_steps(rows, args.lr, png)
  rich.print(rich_table(slopes))
  print(verdict(slopes, args.tolerance))
  return int(any(s.ok is False for s in slopes))


if __name__ == '__main__':
  sys.exit(main())

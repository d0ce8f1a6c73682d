"""One claim against one finished sweep: numbers, verdict, record.

What every script cN_*.py shares. A verdict needs three seeds or more and an
interval; it speaks of this scale and this corpus, never of the paper's.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gamma_jax import errors, files, results
from gamma_jax.analysis import paired, tuning
from gamma_jax.analysis.paired import Overrides, PairedDifference

SUPPORTED, CONTRADICTED = 'supported here', 'contradicted here'
UNDECIDED = 'undecided here'
RATE = 'opt.lr'


@dataclasses.dataclass(frozen=True)
class Claim:
  """What is asked, before any number is seen.

  Attributes:
    title: short.
    claim: what the paper says, in our words.
    refuted_by: the outcome that would count against it.
    command: makes the sweep that is read.
    minutes: expected, on two quiet cores.
  """

  title: str
  claim: str
  refuted_by: str
  command: str
  minutes: int


def call(main: Callable[[], None]) -> int:
  """Runs a script; the exit code. A mistake of the user is one line."""
  try:
    main()
  except errors.ConfigError as error:
    print(f'error: {error}', file=sys.stderr)
    return error.exit_code
  return 0


def verdict(differences: Sequence[PairedDifference], sign: int) -> str:
  """Of differences that the claim expects to have `sign` (-1 or 1).

  Supported when every 95 % t interval lies on that side of 0, contradicted
  when one lies wholly on the other, undecided otherwise and below three pairs.
  """
  if not differences or any(d.indicative for d in differences):
    return UNDECIDED
  ends = [sorted(sign * end for end in d.t_interval) for d in differences]
  if any(high < 0 for _, high in ends):
    return CONTRADICTED
  return SUPPORTED if all(low > 0 for low, _ in ends) else UNDECIDED


def show(d: PairedDifference, form: str = '+.4f') -> str:
  """`-0.3010 [-0.3800, -0.2200], n = 3`."""
  low, high = d.t_interval
  return f'{d.mean:{form}} [{low:{form}}, {high:{form}}], n = {d.n}'


def rows(workdir: Path) -> list[dict]:
  """Finished cells; refuses a sweep that is not finished.

  Raises:
    ConfigError: no sweep there, or cells missing or failed.
  """
  found = results.collect(workdir)
  left = [row.id for row in found if row.status != 'done']
  if left:
    raise errors.ConfigError(
      f'{len(left)} of {len(found)} cells are not done (first: {left[0]}); '
      'run the sweep again before drawing conclusions'
    )
  return paired.finished(found)


@dataclasses.dataclass(frozen=True)
class Tuned:
  """A sweep with each arm at its own best learning rate.

  Attributes:
    rows: of those rates alone, the rate taken out of their overrides.
    rates: by json_key of the arm; empty where one rate was run.
    warnings: of bests at the edge of their grid.
  """

  rows: list[dict]
  rates: dict[str, float]
  warnings: list[str]

  def rate(self, overrides: Overrides) -> str:
    """Of an arm in a setting; '-' where one rate was run."""
    found = self.rates.get(paired.json_key(overrides))
    return '-' if found is None else f'{found:g}'


def tuned(workdir: Path) -> Tuned:
  """Finished cells of a sweep at the best rate of their arm.

  Raises:
    ConfigError: as `rows`.
  """
  found = rows(workdir)
  best, warnings = tuning.best_per_arm(found, 'init.gamma')
  kept = {paired.json_key(b.overrides) for b in best}
  rates = {
    paired.json_key(_without(b.overrides, RATE)): b.tuned[RATE]
    for b in best
    if RATE in b.tuned
  }
  return Tuned(
    [
      {**row, 'overrides': _without(row['overrides'], RATE)}
      for row in found
      if paired.json_key(_without(row['overrides'], 'seed')) in kept
    ],
    rates,
    [w for w in warnings if RATE in w],
  )


def _without(overrides: Overrides, key: str) -> dict:
  return {k: v for k, v in overrides.items() if k != key}


def parse(claim: Claim, description: str | None) -> tuple[Path, Path]:
  """(folder of the sweep, folder of the record) from the command line."""
  (workdir,), out = _parse(claim, description, 1)
  return workdir, out


def parse_sweeps(
  claim: Claim, description: str | None
) -> tuple[list[Path], Path]:
  """(folders of one or more sweeps, folder of the record).

  Raises:
    ConfigError: two folders of one name, which the record could not tell apart.
  """
  workdirs, out = _parse(claim, description, '+')
  if len({workdir.name for workdir in workdirs}) < len(workdirs):
    raise errors.ConfigError('two sweeps have a folder of the same name')
  return workdirs, out


def _parse(claim, description, count):
  parser = argparse.ArgumentParser(
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    epilog=f'The sweep: {claim.command} (about {claim.minutes} minutes)',
  )
  parser.add_argument(
    'workdirs', type=Path, nargs=count, help='of finished sweeps'
  )
  parser.add_argument('--out', type=Path, required=True, help='of the record')
  args = parser.parse_args()
  return [path.resolve() for path in args.workdirs], args.out


def _commands(claim: Claim, workdirs: Sequence[Path]) -> list[str]:
  """How to make the sweeps again: of several, each as it was called."""
  if len(workdirs) == 1:
    return [
      f'**Command.** `{claim.command}` (about {claim.minutes} minutes on two '
      'quiet cores); code, versions and devices are in run.json.\n'
    ]
  lines = ['**Commands.** Code, versions and devices are in run.json.\n']
  for workdir in workdirs:
    first = results.collect(workdir)[0].folder / 'run.json'
    _, *arguments = files.read_json(first)['attempts'][0]['command']
    lines.append(f'- {workdir.name}: `python {shlex.join(arguments)}`')
  return [*lines, '']


def record(
  claim: Claim,
  workdirs: Sequence[Path],
  out: Path,
  *,
  found: str,
  words: str,
  care: str,
  pictures: Sequence[str] = (),
) -> None:
  """Writes README.md and, for each sweep, results.csv, run.json and pictures.

  Args:
    claim: what was asked.
    workdirs: of the sweeps; with more than one, files are named for them.
    out: of the record.
    found: the table, in Markdown.
    words: the verdict.
    care: what to keep in mind, and what was tried.
    pictures: files to copy from the report of each sweep that has them.
  """
  out.mkdir(parents=True, exist_ok=True)
  images, links = [], []
  for workdir in workdirs:
    stem = f'{workdir.name}-' if len(workdirs) > 1 else ''
    cell = results.collect(workdir)[0]
    there = [name for name in pictures if (workdir / 'report' / name).exists()]
    if there and stem:
      images.append(f'{workdir.name}:\n')
    for name in there:
      shutil.copy(workdir / 'report' / name, out / f'{stem}{name}')
      images.append(f'![{claim.title}]({stem}{name})\n')
    for path in (workdir / 'results.csv', cell.folder / 'run.json'):
      shutil.copy(path, out / f'{stem}{path.name}')
      links.append(f'[{stem}{path.name}]({stem}{path.name})')
  text = [
    f'# {claim.title}\n',
    f'**Claim.** {claim.claim}\n',
    f'**What would refute it.** {claim.refuted_by}\n',
    *_commands(claim, workdirs),
    f'**Verdict: {words}.**\n',
    found.rstrip() + '\n',
    *images,
    f'**Read with care.** {care}\n',
    ' · '.join(links) + '\n',
  ]
  files.write_text(out / 'README.md', '\n'.join(text))
  print(f'{claim.title}: {words}\n{found}\n{out}')

"""One claim against one finished sweep: numbers, verdict, record.

What every script cN_*.py shares. A verdict needs three seeds or more and an
interval; it speaks of this scale and this corpus, never of the paper's.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

from gamma_jax import errors, files, results
from gamma_jax.analysis import paired
from gamma_jax.analysis.paired import PairedDifference

SUPPORTED, CONTRADICTED = 'supported here', 'contradicted here'
UNDECIDED = 'undecided here'


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


def parse(claim: Claim, description: str | None) -> tuple[Path, Path]:
  """(folder of the sweep, folder of the record) from the command line."""
  parser = argparse.ArgumentParser(
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    epilog=f'The sweep: {claim.command} (about {claim.minutes} minutes)',
  )
  parser.add_argument('workdir', type=Path, help='of the finished sweep')
  parser.add_argument('--out', type=Path, required=True, help='of the record')
  args = parser.parse_args()
  return args.workdir, args.out


def record(
  claim: Claim,
  workdir: Path,
  out: Path,
  *,
  found: str,
  words: str,
  care: str,
  pictures: Sequence[Path] = (),
) -> None:
  """Writes README.md, results.csv, run.json and pictures of a record.

  Args:
    claim: what was asked.
    workdir: of the sweep.
    out: of the record.
    found: the table, in Markdown.
    words: the verdict.
    care: what to keep in mind, and what was tried.
    pictures: files to copy.
  """
  out.mkdir(parents=True, exist_ok=True)
  images = []
  for picture in pictures:
    shutil.copy(picture, out / picture.name)
    images.append(f'![{claim.title}]({picture.name})\n')
  shutil.copy(workdir / 'results.csv', out / 'results.csv')
  cell = results.collect(workdir)[0]
  shutil.copy(cell.folder / 'run.json', out / 'run.json')
  text = [
    f'# {claim.title}\n',
    f'**Claim.** {claim.claim}\n',
    f'**What would refute it.** {claim.refuted_by}\n',
    f'**Command.** `{claim.command}` (about {claim.minutes} minutes on two '
    'quiet cores); code, versions and devices are in run.json.\n',
    f'**Verdict: {words}.**\n',
    found.rstrip() + '\n',
    *images,
    f'**Read with care.** {care}\n',
    '[results.csv](results.csv) · [run.json](run.json)\n',
  ]
  files.write_text(out / 'README.md', '\n'.join(text))
  print(f'{claim.title}: {words}\n{found}\n{out}')

"""report/index.html: everything on one page, readable without any server."""

from __future__ import annotations

import base64
import html
import json
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gamma_jax import files, findings, report_tables, results
from gamma_jax.analysis.paired import words
from gamma_jax.report_tables import Table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem;
  border-bottom: 1px solid #ddd; }
p, li { max-width: 46rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .7rem; border-bottom: 1px solid #e5e5e5;
  text-align: right; vertical-align: top; white-space: nowrap; }
th { border-bottom: 1.5px solid #888; font-weight: 600; }
th.words, td.words { text-align: left; white-space: normal; min-width: 6rem;
  overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; display: block; }
figure { margin: 1.2rem 0; }
figcaption { color: #555; font-size: .87rem; max-width: 46rem; }
.warnings { border-left: 4px solid #b35900; background: #fdf4e7;
  padding: .5rem 1rem .5rem 2rem; }
.quiet { color: #555; }
.failed, .missing { font-weight: 600; color: #8a3c00; }
details { margin: .8rem 0; }
summary { cursor: pointer; }
pre { font-size: .8rem; overflow-x: auto; background: #f6f6f6; padding: .6rem; }
"""
SHA_LENGTH = 12


class Picture(Protocol):
  """A file in the folder of the page, and what it shows."""

  name: str
  caption: str


def page(
  found: findings.Findings, workdir: Path, pictures: Sequence[Picture]
) -> str:
  """The page as text, pictures inside; links lead to the files of the cells."""
  workdir = Path(workdir)
  title = f'Sweep {workdir.resolve().name}'
  environments = _environments(found.rows)
  warnings = list(found.warnings)
  if len(environments) > 1:
    warnings.append(
      f'The cells were made with {len(environments)} different sets of code, '
      'packages or devices; see the end of this page.'
    )
  parts = [
    _head(title, found),
    _warnings(warnings),
    *_results(found, _pictures(pictures, workdir / 'report')),
    _section('Cells', _cells(found)),
    _section('Configs', *_configs(found.rows)),
    _section('Made with', *_made_with(environments, found.rows)),
  ]
  return (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width">\n'
    f'<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n'
    f'<body>\n{"".join(parts)}</body>\n</html>\n'
  )


def _head(title: str, found: findings.Findings) -> str:
  done = sum(row.status == 'done' for row in found.rows)
  text = f'{done} of {len(found.rows)} cells finished, {len(found.arms)} arms.'
  best = [entry for entry in found.entries if entry.cells.values]
  settings = list({json.dumps(e.setting): e.setting for e in best}.values())
  for setting in settings:
    inside = [entry for entry in best if entry.setting == setting]
    winner = min(inside, key=lambda entry: entry.cells.loss.mean)
    if len(inside) > 1:
      where = f' at {words(setting)}' if setting else ''
      name = words({**winner.arm, **winner.tuned})
      loss = report_tables.show(winner.cells.loss)
      text += f' Lowest mean loss{where}: {name}, {loss} nats per token.'
  link = '<a href="../results.csv">results.csv</a>'
  return f'<h1>{html.escape(title)}</h1>\n{_p(text)}<p>{link}</p>\n'


def _warnings(warnings: Sequence[str]) -> str:
  if not warnings:
    return ''
  items = ''.join(f'<li>{html.escape(w)}</li>\n' for w in warnings)
  return f'<h2>Read this first</h2>\n<ul class="warnings">\n{items}</ul>\n'


def _results(found: findings.Findings, figures: Mapping[str, str]) -> list[str]:
  """The sections with numbers, each picture where it belongs."""
  notes = report_tables.notes(found)
  notes = notes[: len(notes) - len(found.warnings)]
  early = [figures[name] for name in ('loss.png', 'lr.png') if name in figures]
  sizes = [text for name, text in figures.items() if name.startswith('size')]
  paths = [
    text
    for name, text in figures.items()
    if text not in early and text not in sizes
  ]
  parts = [
    _section(
      'Held-out loss',
      *early,
      _table(report_tables.arms(found)),
      *(_p(note) for note in notes),
    )
  ]
  if found.compared:
    parts.append(
      _section(
        f'Against {words(found.baseline)}, paired by seed',
        _table(report_tables.compared(found)),
        _p(
          f'Differences in nats per token, arm minus {words(found.baseline)}. '
          f'p: two-sided t test, not corrected for the '
          f'{len(found.compared)} comparisons. Bootstrap intervals (BCa) are '
          'too narrow with few pairs; trust the t interval there. The last '
          f'column: pairs for a t interval of ± {findings.HALF_WIDTH:g} nats, '
          'if the spread is what these seeds show.'
        ),
      )
    )
  parts.append(
    _section(
      'Effective size',
      *sizes,
      _table(report_tables.sized(found)) if found.sized else '',
      *(_p(note) for note in report_tables.size_notes(found)),
      _left_out(found),
    )
  )
  return parts + ([_section('Over the steps', *paths)] if paths else [])


def _left_out(found: findings.Findings) -> str:
  lines = report_tables.left_out(found)
  if not lines:
    return ''
  items = ''.join(f'<li>{html.escape(line)}</li>\n' for line in lines)
  return (
    f'<details><summary>Cells left out of pairs and fits ({len(lines)})'
    f'</summary>\n<ul>\n{items}</ul></details>\n'
  )


def _pictures(pictures: Sequence[Picture], folder: Path) -> dict[str, str]:
  """Name -> figure with the picture inside, linked to its file."""
  figures = {}
  for picture in pictures:
    data = base64.b64encode((folder / picture.name).read_bytes()).decode()
    caption = html.escape(picture.caption)
    figures[picture.name] = (
      f'<figure><a href="{urllib.parse.quote(picture.name)}">'
      f'<img alt="{caption}" src="data:image/png;base64,{data}"></a>\n'
      f'<figcaption>{caption}</figcaption></figure>\n'
    )
  return figures


def _cells(found: findings.Findings) -> str:
  """Status, loss and files of every cell."""
  lines = []
  for row in found.rows:
    loss = row.numbers.get(results.METRIC)
    links = ', '.join(
      f'<a href="../{urllib.parse.quote(row.id)}/{name}">{name}</a>'
      for name in ('init_report.txt', 'config.json', 'metrics.csv', 'error.txt')
      if (row.folder / name).exists()
    )
    lines.append(
      f'<tr><td class="words">{html.escape(row.id)}</td>'
      f'<td class="words {row.status}">{row.status}'
      f'{html.escape(_reason(row))}</td>'
      f'<td>{row.numbers.get("steps", "")}</td>'
      f'<td>{"" if loss is None else f"{loss:.4f}"}</td>'
      f'<td class="words">{links}</td></tr>\n'
    )
  header = ['cell', 'status', 'steps', 'held-out loss', 'files']
  return _raw_table(header, ''.join(lines), (0, 1, 4))


def _reason(row: results.Row) -> str:
  """Why a cell is not done, if it said so."""
  last = _attempts(row)[-1:]
  if row.status == 'done' or not last or last[0].get('exit') is None:
    return ''
  return f': {last[0]["exit"]}'


def _configs(rows: Sequence[results.Row]) -> list[str]:
  """What differs between the cells, then what they share."""
  configs = {
    row.id: _flat(files.read_json(row.folder / 'config.json'))
    for row in rows
    if (row.folder / 'config.json').exists()
  }
  if not configs:
    return [_p('No cell has a config.json.')]
  differ = results.varying(list(configs.values()))
  shared = {
    key: value
    for key, value in next(iter(configs.values())).items()
    if key not in differ
  }
  body = [
    [name, *(_value(config.get(key)) for key in differ)]
    for name, config in configs.items()
  ]
  common = [[key, _value(value)] for key, value in shared.items()]
  return [
    _table(Table(['cell', *differ], body)),
    '<details><summary>What all cells share '
    f'({len(common)} fields)</summary>\n'
    f'{_table(Table(["field", "value"], common))}</details>\n',
  ]


def _environments(
  rows: Sequence[results.Row],
) -> list[tuple[dict[str, str], set[str]]]:
  """Every distinct set of code, packages and devices, and its cells."""
  groups: dict[str, tuple[dict, set[str]]] = {}
  for row in rows:
    for attempt in _attempts(row):
      made = _environment(attempt)
      groups.setdefault(json.dumps(made), (made, set()))[1].add(row.id)
  return list(groups.values())


def _made_with(environments, rows: Sequence[results.Row]) -> list[str]:
  """A column for each environment, then the command lines."""
  if not environments:
    return [_p('No cell has a run.json.')]
  made = [environment for environment, _ in environments]
  names = dict.fromkeys(key for environment in made for key in environment)
  body = [
    [name, *(_value(environment.get(name)) for environment in made)]
    for name in names
  ]
  body.append(['cells', *(f'{len(ids)}' for _, ids in environments)])
  header = ['', *(f'set {i + 1}' for i in range(len(made)))]
  commands = dict.fromkeys(
    ' '.join(attempt.get('command', []))
    for row in rows
    for attempt in _attempts(row)
  )
  lines = html.escape('\n'.join(commands))
  return [
    _table(Table(header, body, words=range(len(header)))),
    f'<details><summary>Commands</summary>\n<pre>{lines}</pre></details>\n',
  ]


def _environment(attempt: Mapping[str, Any]) -> dict[str, Any]:
  git = attempt.get('git') or {}
  sha = git.get('sha', 'unknown')[:SHA_LENGTH]
  if git.get('dirty'):
    # The same commit with other changes is other code.
    sha += f' + changes {git.get("diff_sha256", "")[:8]}'
  devices = attempt.get('devices') or {}
  return {
    'git': sha,
    'devices': f'{devices.get("count", "?")} x {devices.get("kind", "?")} '
    f'({devices.get("platform", "?")})',
    **{
      name: version or 'not installed'
      for name, version in (attempt.get('versions') or {}).items()
    },
  }


def _attempts(row: results.Row) -> list[dict[str, Any]]:
  path = row.folder / 'run.json'
  return files.read_json(path)['attempts'] if path.exists() else []


def _flat(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Dotted path -> value."""
  flat: dict[str, Any] = {}
  for key, value in config.items():
    if isinstance(value, dict):
      flat |= _flat(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = value
  return flat


def _value(value: Any) -> str:
  return value if isinstance(value, str) else files.to_json(value)


def _section(title: str, *parts: str) -> str:
  return f'<h2>{html.escape(title)}</h2>\n{"".join(parts)}'


def _p(text: str) -> str:
  return f'<p>{html.escape(text)}</p>\n'


def _table(table: Table) -> str:
  lines = []
  for line in table.body:
    cells = ''.join(
      f'<td{_words(i in table.words)}>{html.escape(text)}</td>'
      for i, text in enumerate(line)
    )
    lines.append(f'<tr>{cells}</tr>\n')
  return _raw_table(table.header, ''.join(lines), table.words)


def _raw_table(
  header: Sequence[str], body: str, words_in: Sequence[int]
) -> str:
  cells = ''.join(
    f'<th{_words(i in words_in)}>{html.escape(name)}</th>'
    for i, name in enumerate(header)
  )
  return (
    f'<div class="wide"><table>\n<thead><tr>{cells}</tr></thead>\n'
    f'<tbody>\n{body}</tbody></table></div>\n'
  )


def _words(is_words: bool) -> str:
  return ' class="words"' if is_words else ''

"""What the steps of a run wrote: loss, and per role or matrix its size, rank.

Every figure is one setting, every panel one thing, every line one arm: the mean
over its finished seeds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from gamma_jax import findings, metric_writer, results
from gamma_jax.analysis.paired import Overrides, json_key, words
from gamma_jax.report_style import (
  Label,
  file_name,
  looks,
  panels,
  save,
  step_axis,
)

LOSS = 'train/loss'
RMS = 'rms/params'
SMOOTH = 0.1  # the mean at step s spans SMOOTH * s: light, none at first
# Start of a column -> its figure; the rest of the name is the panel.
_COLUMN = re.compile(
  r'(?P<figure>rms/params|condense/[^/]+|sink(?=/))/(?P<panel>.+)'
)
_LAYER = re.compile(r'(/\d+)+$')
# Figure -> file, axis, caption.
_SAID = {
  RMS: ('rms', 'RMS of the parameters', 'Root mean square of the parameters'),
  'condense/stable_rank': ('stable_rank', 'stable rank', 'Stable rank'),
  'condense/mean_abs_cosine': (
    'mean_abs_cosine',
    'mean |cosine|',
    'Mean |cosine| between neurons: 1 is full condensation',
  ),
  'condense/cluster_share': (
    'cluster_share',
    'share of neurons',
    'Share of neurons in the largest aligned cluster',
  ),
  'condense/frobenius': (
    'frobenius',
    'Frobenius norm',
    'Frobenius norm of the weights',
  ),
  'condense/frobenius_ratio': (
    'frobenius_ratio',
    'norm / initial norm',
    'Frobenius norm over its initial value',
  ),
  'sink': ('sink', 'share or ratio', 'Attention sinks'),
}

Curve = tuple[np.ndarray, np.ndarray]  # steps, values
Traces = Mapping[str, Mapping[str, Curve]]  # figure -> panel -> curve


def draw(found: findings.Findings, folder: Path) -> list[tuple[str, str]]:
  """Files drawn, each with a caption."""
  logged = [traces(entry.cells) for entry in found.entries]
  settings = list(
    {json_key(e.setting): e.setting for e in found.entries}.values()
  )
  look = looks([entry.arm for entry in found.entries])
  drawn = []
  if any(LOSS in trace for trace in logged):
    _losses(found.entries, logged, settings, look, folder / 'curves.png')
    drawn.append(
      (
        'curves.png',
        'Training loss: mean over finished seeds, smoothed over 10 % of the '
        'step.',
      )
    )
  figures = list(dict.fromkeys(name for t in logged for name in t))
  for figure in (name for name in figures if name != LOSS):
    for setting in settings:
      lines = [
        (entry.arm, trace[figure])
        for entry, trace in zip(found.entries, logged, strict=True)
        if entry.setting == setting and figure in trace
      ]
      if lines:
        drawn.append(_panels(figure, lines, setting, look, folder))
  return drawn


def _losses(entries, traces, settings, look, path: Path) -> None:
  figure, axes = panels(len(settings), labels=len(look), height=4.0)
  labels: dict[Axes, list[Label]] = {}
  for ax, setting in zip(axes, settings, strict=True):
    labels[ax] = []
    for entry, trace in zip(entries, traces, strict=True):
      if entry.setting != setting or LOSS not in trace:
        continue
      steps, loss = trace[LOSS]['']
      loss = smooth(loss)
      style = look[json_key(entry.arm)]
      ax.plot(steps, loss, lw=1.3, **style)
      labels[ax].append((loss[-1], _name(entry.arm), style['color']))
    step_axis(ax)
    ax.set_ylabel('training loss (nats per token)')
    ax.set_title(words(setting) if setting else 'Training loss')
  save(figure, labels, path)


def _panels(
  name: str,
  lines: Sequence[tuple[Overrides, Mapping[str, Curve]]],
  setting: Overrides,
  look: Mapping[str, Mapping],
  folder: Path,
) -> tuple[str, str]:
  stem, unit, caption = _SAID.get(name, (name.replace('/', '_'), '', name))
  names = list(dict.fromkeys(panel for _, trace in lines for panel in trace))
  figure, axes = panels(len(names), labels=len(lines), height=2.8)
  labels: dict[Axes, list[Label]] = {}
  for ax, panel in zip(axes, names, strict=True):
    labels[ax] = []
    for arm, trace in lines:
      if panel in trace:
        steps, values = trace[panel]
        style = look[json_key(arm)]
        ax.plot(steps, values, lw=1.3, **style)
        labels[ax].append((values[-1], _name(arm), style['color']))
    if name == RMS:
      ax.set_yscale('log')
    step_axis(ax)
    ax.set_ylabel(unit)
    ax.set_title(panel)
  where = f', {words(setting)}' if setting else ''
  file = file_name(stem, setting)
  save(figure, labels, folder / file)
  layers = '' if name == RMS else 'layers and '
  return file, f'{caption}{where}: mean over {layers}finished seeds.'


def _name(arm: Overrides) -> str:
  return words(arm) if arm else 'all'


def traces(arm: results.Arm) -> Traces:
  """Means over the finished seeds, at the steps that all of them have."""
  seeds = [
    _columns(row.curve)
    for row in arm.rows
    if row.status == 'done' and row.curve.exists()
  ]
  found: dict[str, dict[str, Curve]] = {}
  for key in seeds[0] if seeds else ():
    if not all(key in seed for seed in seeds):
      continue
    steps = sorted(set.intersection(*(set(seed[key]) for seed in seeds)))
    values = [[seed[key][step] for step in steps] for seed in seeds]
    if steps:
      curve = np.array(steps), np.mean(values, axis=0)
      found.setdefault(key[0], {})[key[1]] = curve
  return found


def _columns(path: Path) -> dict[tuple[str, str], dict[int, float]]:
  """(figure, panel) -> step -> value, mean over layers."""
  found: dict[tuple[str, str], dict[int, list[float]]] = {}
  for line in metric_writer.read_metrics(path):
    for column, value in line.items():
      key = _place(column)
      if key:
        found.setdefault(key, {}).setdefault(line['step'], []).append(value)
  return {
    key: {step: sum(values) / len(values) for step, values in steps.items()}
    for key, steps in found.items()
  }


def _place(column: str) -> tuple[str, str] | None:
  """('condense/stable_rank', 'q') of 'condense/stable_rank/q/0'."""
  if column == LOSS:
    return LOSS, ''
  match = _COLUMN.fullmatch(column)
  return match and (match['figure'], _LAYER.sub('', match['panel']))


def smooth(values: np.ndarray) -> np.ndarray:
  """Centred mean over SMOOTH of the index: even width on a log axis."""
  at = np.arange(len(values))
  half = (at * SMOOTH / 2).astype(int)
  low, high = at - half, np.minimum(at + half + 1, len(values))
  total = np.concatenate([[0.0], np.cumsum(values)])
  return (total[high] - total[low]) / (high - low)

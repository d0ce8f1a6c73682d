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

from gamma_jax import findings, metric_writer, report_plot_layers, results
from gamma_jax.analysis.paired import Overrides, json_key, words
from gamma_jax.report_style import (
  GREY,
  Label,
  file_name,
  looks,
  panels,
  save,
  step_axis,
  token_axis,
)

LOSS = 'train/loss'
TOKENS = 'train/tokens_seen'
RMS = 'rms/params'
RANDOM_RANK = 'condense/stable_rank_random'
# Drawn as dotted lines beside what they are the reference of.
_REFERENCES = (RANDOM_RANK,)
_FLOOR = 'uniform_floor'  # of the panel 'share' of sinks
SMOOTH = 0.1  # the mean at step s spans SMOOTH * s: light, none at first
# Start of a column -> its figure; the rest of the name is the panel.
_COLUMN = re.compile(
  r'(?P<figure>rms/params|condense/[^/]+|(sink|residual)(?=/))/(?P<panel>.+)'
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
  'condense/effective_rank': (
    'effective_rank',
    'effective rank',
    'Effective rank: exp of the entropy of the singular values',
  ),
  'sink': ('sink', 'share or ratio', 'Attention sinks, gates, activations'),
  'residual': (
    'residual',
    'RMS(branch) / RMS(stream)',
    'What each branch adds to the residual stream',
  ),
}

# Panels of the figure of sinks -> axis.
_SINK_UNITS = {
  'share': 'attention on the first token',
  'entropy': 'entropy (nats)',
  'entropy_share': 'entropy / ln(visible keys)',
  'gate_mean': 'mean gate',
  'gate_closed': 'share of gates below 0.1',
  'max_activation': 'largest |x| / RMS(x)',
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
  for figure in figures:
    if figure in (LOSS, TOKENS, *_REFERENCES):
      continue
    for setting in settings:
      lines = [
        (entry.arm, trace)
        for entry, trace in zip(found.entries, logged, strict=True)
        if entry.setting == setting and figure in trace
      ]
      if lines:
        drawn.append(_panels(figure, lines, setting, look, folder))
  return drawn + report_plot_layers.draw(found, settings, folder)


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
  lines: Sequence[tuple[Overrides, Traces]],
  setting: Overrides,
  look: Mapping[str, Mapping],
  folder: Path,
) -> tuple[str, str]:
  stem, unit, caption = _SAID.get(name, (name.replace('/', '_'), '', name))
  names = dict.fromkeys(panel for _, trace in lines for panel in trace[name])
  names = [panel for panel in names if panel != _FLOOR]
  figure, axes = panels(len(names), labels=len(lines), height=2.8)
  labels: dict[Axes, list[Label]] = {}
  for ax, panel in zip(axes, names, strict=True):
    labels[ax] = []
    for arm, trace in lines:
      if panel in trace[name]:
        x, values = trace[name][panel]
        if name != RMS:
          x = _tokens(trace, x)
        style = look[json_key(arm)]
        ax.plot(x, values, lw=1.3, **style)
        labels[ax].append((values[-1], _name(arm), style['color']))
    for level in _references(name, panel, lines):
      ax.axhline(level, color=GREY, lw=0.9, ls=':')
    if name == RMS:
      ax.set_yscale('log')
      step_axis(ax)
    else:
      token_axis(ax)
    ax.set_ylabel(_SINK_UNITS.get(panel, unit) if name == 'sink' else unit)
    ax.set_title(panel)
  where = f', {words(setting)}' if setting else ''
  file = file_name(stem, setting)
  save(figure, labels, folder / file)
  layers = '' if name == RMS else 'layers and '
  dotted = {
    'condense/stable_rank': ' Dotted: a random matrix of that shape.',
    'sink': ' Dotted: uniform attention.',
  }.get(name, '')
  return file, f'{caption}{where}: mean over {layers}finished seeds.{dotted}'


def _tokens(trace: Traces, steps: np.ndarray) -> np.ndarray:
  """Tokens seen at `steps`; 0 at step 0, which has no line of its own."""
  at, tokens = trace[TOKENS]['']
  return np.interp(steps, np.r_[0, at], np.r_[0, tokens])


def _references(name: str, panel: str, lines) -> set[float]:
  """Levels to draw in a panel, those of its first arm that has them."""
  for _, trace in lines:
    if name == 'condense/stable_rank' and RANDOM_RANK in trace:
      curve = trace[RANDOM_RANK].get(panel)
    elif (name, panel) == ('sink', 'share'):
      curve = trace[name].get(_FLOOR)
    else:
      return set()
    if curve:
      return {float(curve[1][-1])}
  return set()


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
  if column in (LOSS, TOKENS):
    return column, ''
  match = _COLUMN.fullmatch(column)
  return match and (match['figure'], _LAYER.sub('', match['panel']))


def smooth(values: np.ndarray) -> np.ndarray:
  """Centred mean over SMOOTH of the index: even width on a log axis."""
  at = np.arange(len(values))
  half = (at * SMOOTH / 2).astype(int)
  low, high = at - half, np.minimum(at + half + 1, len(values))
  total = np.concatenate([[0.0], np.cumsum(values)])
  return (total[high] - total[low]) / (high - low)

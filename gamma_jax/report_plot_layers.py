"""Which layer the attention sink sits in, at the last measured step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gamma_jax import findings, metric_writer, results
from gamma_jax.analysis.paired import Overrides, json_key, words
from gamma_jax.report_style import (
  GREY,
  Label,
  file_name,
  looks,
  panels,
  save,
)

_SHARE = re.compile(r'sink/share/(?P<layer>\d+)(/\d+)?')
_FLOOR = 'sink/uniform_floor'


def draw(
  found: findings.Findings, settings: Sequence[Overrides], folder: Path
) -> list[tuple[str, str]]:
  """Files drawn, each with a caption: one figure for each setting."""
  measured = [by_layer(entry.cells) for entry in found.entries]
  look = looks([entry.arm for entry in found.entries])
  drawn = []
  for setting in settings:
    lines = [
      (entry.arm, shares)
      for entry, shares in zip(found.entries, measured, strict=True)
      if entry.setting == setting and shares is not None
    ]
    if not lines:
      continue
    figure, (ax,) = panels(1, labels=len(lines), height=3.0)
    labels: list[Label] = []
    for arm, (shares, _) in lines:
      style = look[json_key(arm)]
      ax.plot(range(len(shares)), shares, marker='o', ms=4, lw=1.3, **style)
      labels.append((shares[-1], words(arm) if arm else 'all', style['color']))
    for floor in {floor for _, (_, floor) in lines}:
      ax.axhline(floor, color=GREY, lw=0.9, ls=':')
    ax.set_xticks(range(max(len(shares) for _, (shares, _) in lines)))
    ax.set_xlabel('layer')
    ax.set_ylabel('attention on the first token')
    ax.set_ylim(bottom=0)
    file = file_name('sink_by_layer', setting)
    save(figure, {ax: labels}, folder / file)
    where = f', {words(setting)}' if setting else ''
    caption = (
      f'Attention sink by layer{where}, at the last measured step: mean over '
      'heads and finished seeds. Dotted: uniform attention.'
    )
    drawn.append((file, caption))
  return drawn


def by_layer(arm: results.Arm) -> tuple[np.ndarray, float] | None:
  """(share [L], uniform floor) of the last measured step; None without."""
  seeds = []
  for row in arm.rows:
    if row.status != 'done' or not row.curve.exists():
      continue
    lines = metric_writer.read_metrics(row.curve)
    measured = [line for line in lines if _FLOOR in line]
    if measured:
      seeds.append(measured[-1])
  if not seeds:
    return None
  shares: dict[int, list[float]] = {}
  for line in seeds:
    for name, value in line.items():
      if match := _SHARE.fullmatch(name):
        shares.setdefault(int(match['layer']), []).append(value)
  mean = np.array([np.mean(shares[layer]) for layer in sorted(shares)])
  return mean, float(np.mean([line[_FLOOR] for line in seeds]))

"""The page of a comparison of two models, readable without any server."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

import numpy as np

from gamma_jax import token_text
from gamma_jax.analysis import token_gap
from gamma_jax.analysis.token_examples import Example
from gamma_jax.analysis.token_gap import Bin, Estimate, TokenGap
from gamma_jax.data.tokenizer import Tokenizer

IDS = 12  # token ids named on each side
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #111; background: #fff;
  max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem;
  border-bottom: 1px solid #ddd; }
p, li { max-width: 46rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; margin: .6rem 0;
  font-variant-numeric: tabular-nums; }
th, td { padding: .18rem .7rem; border-bottom: 1px solid #e5e5e5;
  text-align: right; white-space: nowrap; }
th { border-bottom: 1.5px solid #888; }
td.text { text-align: left; white-space: pre; }
.side { display: flex; flex-wrap: wrap; gap: 0 2.5rem; }
.quiet { color: #555; font-size: .87rem; }
.legend { display: flex; align-items: center; gap: .6rem; margin: .8rem 0; }
.legend b { display: inline-block; width: 2.4rem; height: 1.2rem;
  box-shadow: 0 0 0 .5px #bbb; }
.text i { font: .72em ui-monospace, monospace; color: #444; }
pre.text { font: 15px/1.75 system-ui, sans-serif; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: .1rem 0 1.1rem; padding: .4rem .6rem;
  border-left: 3px solid #ddd; }
.text span { unicode-bidi: isolate; }
.text span.hit { outline: 2.5px solid #111; }
.key { position: sticky; top: 0; background: #fff; z-index: 1; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(
  names: Sequence[str],
  gap: TokenGap,
  extremes: tuple[Sequence[Example], Sequence[Example]],
  tokenizer: Tokenizer,
  sources: Sequence[str],
  window: int,
) -> str:
  """The page as text, with nothing outside it.

  Args:
    names: of a and of b.
    gap: what was found.
    extremes: where a gains most and where it loses most, most first.
    tokenizer: of the token ids.
    sources: part of the data that each document is of.
    window: tokens that a model sees together.
  """
  a, b = (html.escape(name) for name in names)
  title = f'Token gaps: {a} against {b}'

  def examples(found: Sequence[Example]) -> str:
    text = ''.join(_example(e, tokenizer, sources, window) for e in found)
    return text or '<p>There is no such token.</p>\n'

  gaining, losing = extremes
  parts = [
    f'<h1>{title}</h1>\n<p><b>a</b> is {a}.<br><b>b</b> is {b}.</p>\n',
    _p(headline(gap)),
    _p(_READING),
    '<h2>By difficulty</h2>\n<div class="side">\n',
    _chart('gain, nats per token', gap.difficulty, lambda x: x.gain),
    _chart('Delta_sym', gap.difficulty, lambda x: x.delta_sym),
    '</div>\n',
    _table(gap.difficulty, 'difficulty (nats)', '{:.3f}'),
    '<h2>By frequency of the token</h2>\n',
    _p(_FREQUENCY),
    _table(gap.frequency, 'share of all tokens', '{:.2g}'),
    '<h2>Token ids that add most to the overall gain</h2>\n',
    '<div class="side">\n',
    _ids(gap, tokenizer, 1, 'a better'),
    _ids(gap, tokenizer, -1, 'b better'),
    f'</div>\n{_legend()}',
    '<h2>Largest gains of a</h2>\n',
    _p(_EXAMPLES.format(window=window)),
    examples(gaining),
    f'<h2>Largest losses of a</h2>\n{examples(losing)}',
  ]
  return (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
    '<meta name="viewport" content="width=device-width">\n'
    f'<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n'
    f'<body>\n{"".join(parts)}</body>\n</html>\n'
  )


_READING = (
  'Above 0, a is better, everywhere on this page. gain is the NLL of b minus '
  'that of a; Delta_sym is (p_a - p_b) / (p_a + p_b) of the true next token; '
  'difficulty is the mean NLL of the two. Intervals are 95 %, from resamples '
  'of whole documents; with fewer than some thirty documents they are too '
  'narrow. They say nothing about other seeds: that takes more cells.'
)
_FREQUENCY = 'Frequencies are those in the held-out text that was scored.'
_EXAMPLES = (
  'At most one token of a document. Colours show Delta_sym of every token; the '
  'framed one is meant. Small codes are bytes of an unfinished character, or '
  'characters that do not show. Hover for numbers. Documents are cut in '
  'windows of {window} tokens; a model sees what comes before in the window, '
  'which may begin earlier than the text here, and one token before that. Text '
  'after the frame it does not see.'
)


def headline(gap: TokenGap) -> str:
  """The overall result in one sentence of plain text."""
  one = gap.overall
  return (
    f'{one.tokens:,} tokens of {one.documents:,} documents: NLL '
    f'{one.nll_a:.4f} (a) and {one.nll_b:.4f} (b) nats per token, gain of a '
    f'{_interval(one.gain)}, mean Delta_sym {_interval(one.delta_sym)}.'
  )


def _interval(e: Estimate) -> str:
  if math.isnan(e.low):
    return f'{e.mean:+.4f}'
  return f'{e.mean:+.4f} [{e.low:+.4f}, {e.high:+.4f}]'


def _table(bins: Sequence[Bin], key: str, style: str) -> str:
  header = [key, 'tokens', 'documents', 'NLL a', 'NLL b', 'gain (nats)']
  header += ['Delta_sym', 'adds to gain']
  rows = ''
  for one in bins:
    cells = [
      f'{style.format(one.low)} to {style.format(one.high)}',
      f'{one.tokens:,}',
      f'{one.documents:,}',
      f'{one.nll_a:.4f}',
      f'{one.nll_b:.4f}',
      _interval(one.gain),
      _interval(one.delta_sym),
      f'{one.contribution:+.5f}',
    ]
    rows += '<tr>' + ''.join(f'<td>{c}</td>' for c in cells) + '</tr>\n'
  head = ''.join(f'<th>{h}</th>' for h in header)
  return f'<div class="wide"><table>\n<tr>{head}</tr>\n{rows}</table></div>\n'


def _ids(gap: TokenGap, tokenizer: Tokenizer, sign: int, label: str) -> str:
  order = np.argsort(-sign * gap.token_gain, kind='stable')[:IDS]
  total = gap.overall.tokens
  rows = ''
  for i in order[sign * gap.token_gain[order] > 0]:
    text = token_text.shown([_piece(tokenizer, i)])[0]
    count, sum_ = int(gap.token_counts[i]), gap.token_gain[i]
    rows += (
      f'<tr><td class="text"><span>{text}</span></td><td>{count:,}</td>'
      f'<td>{sum_ / count:+.4f}</td><td>{sum_ / total:+.5f}</td></tr>\n'
    )
  head = f'<tr><th>{label}</th><th>tokens</th><th>gain (nats)</th>'
  return f'<table>\n{head}<th>adds to gain</th></tr>\n{rows}</table>\n'


def _legend() -> str:
  swatches = ''.join(
    f'<b style="background:{token_text.colour(x)}" title="{x:+.2f}"></b>'
    for x in np.linspace(-1, 1, 9)
  )
  return (
    '<div class="legend key"><span>Delta_sym −1: b better</span>'
    f'<span>{swatches}</span><span>+1: a better</span></div>\n'
  )


def _example(
  e: Example, tokenizer: Tokenizer, sources: Sequence[str], window: int
) -> str:
  pieces = [_piece(tokenizer, i) for i in e.token]
  delta = token_gap.delta_sym(e.nll_a, e.nll_b)
  spans = ''
  for i, text in enumerate(token_text.shown(pieces)):
    numbers = (
      f'{token_text.plain(pieces[i])} (id {e.token[i]}): Delta_sym '
      f'{delta[i]:+.3f}; NLL {e.nll_a[i]:.3f} (a), {e.nll_b[i]:.3f} (b)'
    )
    hit = ' class="hit"' if i == e.at else ''
    spans += (
      f'<span{hit} style="background:{token_text.colour(delta[i])}" '
      f'title="{html.escape(numbers)}">{text}</span>'
    )
  at = e.at
  about = (
    f'{sources[e.doc]}, document {e.doc}, token {e.position}, '
    f'{e.position % window} into its window: '
    f'{token_text.plain(pieces[at])} has NLL {e.nll_a[at]:.3f} (a) and '
    f'{e.nll_b[at]:.3f} (b), Delta_sym {delta[at]:+.3f}'
  )
  return (
    f'<div class="quiet">{html.escape(about)}</div>\n'
    # The first line break after <pre> is dropped.
    f'<pre class="text">\n{spans}</pre>\n'
  )


def _piece(tokenizer: Tokenizer, token: int) -> bytes | None:
  return None if token == tokenizer.eot_id else tokenizer.decode([token])


def _p(text: str) -> str:
  return f'<p>{html.escape(text)}</p>\n'


def _chart(
  title: str, bins: Sequence[Bin], pick: Callable[[Bin], Estimate]
) -> str:
  """Points with whiskers over bins of equal width, as SVG."""
  width, height, left, bottom, top = 520, 260, 64, 44, 28
  points = [pick(one) for one in bins]
  ends = [v for e in points for v in (e.mean, e.low, e.high) if v == v]
  low, high = min(*ends, 0.0), max(*ends, 0.0)
  span = (high - low) or 1.0

  def y(value: float) -> float:
    return top + (high - value) / span * (height - top - bottom)

  def x(i: float) -> float:
    return left + (i + 0.5) / len(bins) * (width - left - 10)

  marks = [_line(left, y(0), width - 10, y(0), '#888')]
  # An end next to 0 would be written over it.
  apart = [end for end in (low, high) if abs(end) > 0.06 * span]
  for value in (0.0, *apart):
    marks.append(_label(left - 6, y(value) + 4, f'{value:+.3g}', 'end'))
  for i, e in enumerate(points):
    marks.append(f'<circle cx="{x(i):.1f}" cy="{y(e.mean):.1f}" r="3.2"/>')
    if e.low == e.low:
      marks.append(_line(x(i), y(e.low), x(i), y(e.high), '#111'))
  every = -(-len(bins) // 8)
  for i in range(0, len(bins), every):
    marks.append(
      _label(
        x(i),
        height - 26,
        f'{(bins[i].nll_a + bins[i].nll_b) / 2:.2g}',
        'middle',
      )
    )
  marks += [
    _label(left, 14, f'{title} (above 0: a better)', 'start'),
    _label((left + width) / 2, height - 8, 'mean difficulty, nats', 'middle'),
  ]
  return (
    f'<svg role="img" width="{width}" height="{height}" font-size="12" '
    f'aria-label="{html.escape(title)} by difficulty">\n'
    f'{"".join(marks)}</svg>\n'
  )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
  return (
    f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
    f'stroke="{colour}" stroke-width="1.3"/>'
  )


def _label(x: float, y: float, text: str, anchor: str) -> str:
  return (
    f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
    f'{html.escape(text)}</text>\n'
  )

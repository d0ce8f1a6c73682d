"""The init report: is this run what it claims to be, before it costs anything?

Per matrix: role, shape, d_in, std asked, std got, z-score, gamma in force. Per
norm: the share of scale that its epsilon leaves. Per branch: its size over the
stream. Logits and loss against ln V. Adam: gradients that its epsilon drowns.
Measured on real parameters and a real batch where they fit; else predicted
(`init_theory`) and marked so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from gamma_jax import init_rules, init_theory, layers, model, moe, train_step
from gamma_jax import program as program_lib
from gamma_jax.analysis import common_random_numbers
from gamma_jax.config import Config

MEASURED, PREDICTED = 'measured', 'predicted'
Z_LIMIT = 5.0  # sampling errors; 3e-7 two-sided, so 1000 matrices pass
KEPT_LIMIT = 0.95  # a norm that keeps less of its input's scale is warned of
ADAM_MARGIN = 100.0  # gradients within this factor of Adam's eps are counted


class InitMismatch(RuntimeError):
  """A matrix does not follow its rule: a fault of the code, not of the user."""


@dataclasses.dataclass(frozen=True)
class Matrix:
  """One row of the report: a parameter over all its layers.

  Attributes:
    path: 'blocks/attn/q/kernel'.
    kind: what it is.
    role: role whose gamma it follows; 'norm' for the exempt scales.
    shape: full shape, layer axis first.
    d_in: stated fan-in of one copy.
    std_asked: by the rule; 0 for norm scales.
    std_got: of the drawn values, or None when nothing was drawn.
    z: worst (over layers) deviation of the std in sampling errors, or None.
    gamma: -ln(std_asked) / ln(d_in), whatever the rule.
    grad_rms: RMS of the first mean gradient.
    adam_drowned: True where grad_rms is within ADAM_MARGIN of Adam's epsilon.
  """

  path: str
  kind: str
  role: str
  shape: tuple[int, ...]
  d_in: int
  std_asked: float
  std_got: float | None
  z: float | None
  gamma: float | None
  grad_rms: float
  adam_drowned: bool


@dataclasses.dataclass(frozen=True)
class Norm:
  """One norm: input mean square, and the share of scale left by epsilon."""

  name: str
  mean_square: float
  kept: float


@dataclasses.dataclass(frozen=True)
class Branch:
  """One residual branch: RMS(branch) / RMS(stream)."""

  name: str
  ratio: float


@dataclasses.dataclass(frozen=True)
class InitReport:
  """Everything about step 0. `source` is 'measured' or 'predicted'.

  `draws` is the `init_fingerprint`; empty where no process has all parameters.
  """

  source: str
  rule: str
  norm_eps: float
  adam_eps: float
  matrices: tuple[Matrix, ...]
  norms: tuple[Norm, ...]
  branches: tuple[Branch, ...]
  logits_std: float
  loss: float
  ln_vocab: float
  adam_drowned_share: float
  draws: Mapping[str, int]
  warnings: tuple[str, ...] = ()

  def raise_if_off(self) -> None:
    """Raises InitMismatch naming every matrix that escaped its rule."""
    off = [
      f'{m.path} (asked {m.std_asked:.3e}, got {m.std_got:.3e}, z {m.z:.1f})'
      for m in self.matrices
      if m.z is not None and abs(m.z) > Z_LIMIT
    ]
    if off:
      raise InitMismatch('parameters off their init rule: ' + '; '.join(off))

  def to_dict(self) -> dict:
    """Plain data for init_report.json."""
    return dataclasses.asdict(self)


def predicted(config: Config) -> InitReport:
  """Report from theory alone; needs no memory to speak of."""
  theory = init_theory.predict(config)
  rule = init_rules.make_rule(config.init, config.model)
  boxed = model.abstract_params(config.model, rule)
  norms, branches = _from_layers(config, theory.layers, theory.final_stream)
  return _assemble(
    config,
    PREDICTED,
    declarations=layers.declarations(boxed),
    stats={},
    grad_rms=lambda path, kind: _rms(theory.grad_rms[kind]),
    norms=norms,
    branches=branches,
    logits_std=theory.logits_std,
    loss=theory.loss,
    draws={},
  )


def measured(
  config: Config,
  program: program_lib.Program,
  params,
  batch: Mapping[str, np.ndarray],
) -> InitReport:
  """Report from real parameters and one real batch of the run.

  Args:
    config: the cell.
    program: its compiled functions.
    params: freshly initialised parameters.
    batch: a training batch, fields [B, T + 1].
  """
  h = train_step.hyper(config)
  probe = _probe_fn(program)
  out = jax.device_get(probe(params, h, program.put_batch(dict(batch))))
  stats = {k: (v['mean'], v['std']) for k, v in out['params'].items()}
  seen = out['probe']
  blocks = tuple(
    init_theory.Layer(
      *(
        float(seen['blocks'][name][i])
        for name in (
          'attn_stream_ms',
          'attn_branch_ms',
          'mlp_stream_ms',
          'mlp_branch_ms',
        )
      )
    )
    for i in range(config.model.L)
  )
  norms, branches = _from_layers(config, blocks, float(seen['final_stream_ms']))
  return _assemble(
    config,
    MEASURED,
    declarations=program.declarations,
    stats=stats,
    grad_rms=lambda path, kind: float(out['grads'][path]),
    norms=norms,
    branches=branches,
    logits_std=float(out['logits_std']),
    loss=float(out['loss']),
    draws=_draws(params),
  )


@functools.lru_cache(maxsize=8)
def _compiled_probe(config: Config, everywhere: jax.NamedSharding):
  return jax.jit(functools.partial(_probe, config), out_shardings=everywhere)


def _probe_fn(program: program_lib.Program):
  return program.in_mesh(_compiled_probe(program.config, program.everywhere))


def _probe(config: Config, params, h: train_step.Hyper, batch):
  """Everything measured, as small arrays."""
  batch = train_step.split_labels(batch)
  moe_state = moe.initial_state(config.model)
  grads, sums = train_step.mean_gradient(config, h, params, batch, moe_state)
  net = train_step.transformer(config)
  (hidden, head), seen = net.apply(
    {'params': params, moe.STATE: moe_state},
    batch['inputs'],
    batch['segment_ids'],
    batch['positions'],
    h.norm_eps,
    mutable=[model.PROBE],
  )
  # Logits of one row are enough for a standard deviation.
  logits = hidden[:1].astype(jnp.float32) @ head.astype(jnp.float32)
  named = _by_path(params)
  return {
    'params': {k: _layer_stats(k, v) for k, v in named.items()},
    'grads': {k: jnp.sqrt(jnp.mean(g**2)) for k, g in _by_path(grads).items()},
    'probe': seen[model.PROBE],
    'logits_std': jnp.std(logits),
    'loss': sums.nll_sum / jnp.maximum(sums.tokens, 1),
  }


def _by_path(tree) -> dict[str, jax.Array]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {'/'.join(p.key for p in path): leaf for path, leaf in leaves}


def _draws(params) -> dict[str, int]:
  named = _by_path(params)
  whole = all(value.is_fully_addressable for value in named.values())
  return common_random_numbers.init_fingerprint(named) if whole else {}


def _layer_stats(path: str, value: jax.Array) -> dict[str, jax.Array]:
  copies = value if path.startswith('blocks/') else value[None]
  flat = copies.astype(jnp.float32).reshape(len(copies), -1)
  return {'mean': flat.mean(axis=1), 'std': flat.std(axis=1)}


def _from_layers(config: Config, blocks, final: float):
  """Norm and branch rows from the mean squares around each block."""
  eps = config.model.norm_eps
  norms, branches = [], []
  for i, b in enumerate(blocks):
    for name, stream, branch in (
      ('attn', b.attn_stream, b.attn_branch),
      ('mlp', b.mlp_stream, b.mlp_branch),
    ):
      norms.append((f'layer {i} {name} norm', stream))
      branches.append(Branch(f'layer {i} {name}', (branch / stream) ** 0.5))
  norms.append(('final norm', final))
  rows = [Norm(n, ms, (ms / (ms + eps)) ** 0.5) for n, ms in norms]
  return tuple(rows), tuple(branches)


def _assemble(
  config, source, *, declarations, stats, grad_rms, norms, branches, **rest
) -> InitReport:
  rule = init_rules.make_rule(config.init, config.model)
  rows = []
  for path, d in declarations.items():
    if d.kind == layers.NORM_SCALE:
      rows.append(_norm_row(path, d, stats))
    else:
      g = grad_rms(path, d.kind)
      rows.append(_matrix_row(config, rule, path, d, stats.get(path), g))
  sizes = {r.path: math.prod(r.shape) for r in rows if r.role != 'norm'}
  drowned = sum(sizes[r.path] for r in rows if r.adam_drowned)
  report = InitReport(
    source=source,
    rule=config.init.rule,
    norm_eps=config.model.norm_eps,
    adam_eps=config.opt.eps,
    matrices=tuple(rows),
    norms=norms,
    branches=branches,
    ln_vocab=math.log(config.model.V),
    adam_drowned_share=drowned / sum(sizes.values()),
    **rest,
  )
  return dataclasses.replace(report, warnings=_warnings(report))


def _matrix_row(config, rule, path, d, stats, g: float) -> Matrix:
  asked = float(rule.matrix_std(d.kind, d.fan_in, d.fan_out))
  got = z = None
  if stats is not None:
    stds = np.asarray(stats[1], np.float64)
    per_copy = math.prod(d.value.shape) / len(stds)
    errors = (stds / asked - 1) * math.sqrt(2 * per_copy)
    got = float(np.sqrt(np.mean(stds**2)))
    z = float(errors[np.argmax(np.abs(errors))])
  return Matrix(
    path=path,
    kind=d.kind,
    role=init_rules.ROLE_OF_KIND[d.kind],
    shape=tuple(d.value.shape),
    d_in=d.fan_in,
    std_asked=asked,
    std_got=got,
    z=z,
    gamma=-math.log(asked) / math.log(d.fan_in) if asked > 0 else None,
    grad_rms=g,
    adam_drowned=g < ADAM_MARGIN * config.opt.eps,
  )


def _norm_row(path, d, stats) -> Matrix:
  got = z = None
  if path in stats:
    mean, std = stats[path]
    got = float(np.max(std))
    exact = np.all(np.asarray(mean) == 1.0) and got == 0.0
    z = 0.0 if exact else math.inf
  shape = tuple(d.value.shape)
  return Matrix(
    path, d.kind, 'norm', shape, 1, 0.0, got, z, None, math.nan, False
  )


def _rms(values: np.ndarray) -> float:
  return float(np.sqrt(np.mean(np.square(values))))


def _warnings(report: InitReport) -> tuple[str, ...]:
  """Says in words what hides the effect of a small init."""
  said = []
  for norm in report.norms:
    if norm.kept < KEPT_LIMIT:
      wish = 10 ** math.floor(math.log10(norm.mean_square * 1e-4))
      said.append(
        f'{norm.name} keeps {norm.kept:.0%} of its scale: eps '
        f'{report.norm_eps:g} against an input variance of '
        f'{norm.mean_square:.1e}; use {min(wish, 1e-12):g}'
      )
  for m in report.matrices:
    if m.adam_drowned:
      size = m.grad_rms / (m.grad_rms + report.adam_eps)
      said.append(
        f'{m.path}: first gradient RMS {m.grad_rms:.1e} is within '
        f"{ADAM_MARGIN:g}x of Adam's eps {report.adam_eps:g}; its first update "
        f'is {size:.0%} of full size'
      )
  excess = report.loss - report.ln_vocab
  if abs(excess) > 1.0:
    said.append(
      f'loss {report.loss:.2f} is {excess:+.2f} from ln V: logits start with '
      f'std {report.logits_std:.2f}'
    )
  return tuple(said)

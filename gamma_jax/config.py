"""Frozen configuration: what the library sees below the ml_collections seam.

`configs/*.py` build a ConfigDict; `gamma_jax.configure.resolve` turns it into
the `Config` of this file once. Defaults here and in configs/base.py are equal
(tested). Letters: B batch, T query, S key length, D model, F hidden, N heads,
K kv heads, H head dim, V vocab, L layers.
"""

from __future__ import annotations

import dataclasses

# Every matrix has one role; `init.overrides` and the metrics speak of roles.
ROLES = ('embed', 'head', 'qk', 'vo', 'gate', 'mlp', 'router')


@dataclasses.dataclass(frozen=True)
class MoeConfig:
  """Experts in place of the MLP of every block; none with experts=0."""

  experts: int = 0
  top_k: int = 2  # experts a token goes to
  F: int = 0  # hidden units of one expert; 0: model.F
  shared: int = 0  # experts that every token goes to, besides top_k
  load_balance: float = 0.01  # weight of the balancing loss of each layer
  router_z: float = 0.001  # weight of logsumexp(router logits)^2
  bias_rate: float = 0.0  # step of the balancing bias; 0: no bias
  dispatch: str = 'blocks'  # blocks | ragged | dense
  block: int = 128  # rows multiplied at once; dispatch blocks


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape and numerics of the decoder."""

  D: int = 64
  F: int = 256
  L: int = 4
  N: int = 4
  K: int = 2
  H: int = 16
  V: int = 4096
  mlp: str = 'swiglu'  # swiglu | gelu
  gate: str = 'elementwise'  # none | headwise | elementwise
  norm_eps: float = 1e-12  # traced
  qk_norm: bool = False
  tied: bool = False
  rope_theta: float = 10000.0
  scan: bool = True  # False unrolls the same stacked parameters
  remat: str = 'none'  # none | full | dots
  dtype: str = 'float32'  # compute dtype: float32 | bfloat16
  param_dtype: str = 'float32'
  attention: str = 'blocks'  # blocks | splash (TPU) | cudnn (GPU)
  attention_block: int = 512  # queries attended at once; attention blocks
  moe: MoeConfig = MoeConfig()


@dataclasses.dataclass(frozen=True)
class InitOverrides:
  """gamma for one role, or None to follow `init.gamma`. Traced."""

  embed: float | None = None
  head: float | None = None
  qk: float | None = None
  vo: float | None = None
  gate: float | None = None
  mlp: float | None = None
  router: float | None = None


@dataclasses.dataclass(frozen=True)
class InitConfig:
  """How weights start: std = d_in^-gamma, or a comparison rule."""

  rule: str = 'gamma'  # gamma|fixed|xavier|he|gpt2|megatron|small_wang
  gamma: float = 1.0  # traced
  std: float = 0.02  # traced; rules fixed and megatron
  distribution: str = 'normal'  # normal | truncated_normal
  depth_scale: bool = False  # residual outputs / sqrt(2 L)
  down_fan_in: str = 'hidden'  # hidden (true fan-in F) | model (D)
  overrides: InitOverrides = InitOverrides()


@dataclasses.dataclass(frozen=True)
class OptConfig:
  """AdamW and its schedule, counted in optimizer updates."""

  lr: float = 2e-3  # peak; traced
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.1  # traced
  clip: float = 1.0  # global norm; 0 turns it off
  warmup_steps: int = 50
  schedule: str = 'cosine'  # cosine | wsd | constant
  schedule_steps: int | None = None  # None: train.steps
  final_lr_fraction: float = 0.1
  wsd_decay_fraction: float = 0.2


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """Length and batch. `batch_size` counts sequences over all devices."""

  steps: int = 500
  batch_size: int = 8
  seq_len: int = 128
  accumulation: int = 1
  z_loss: float = 0.0
  loss_chunk: int = 512  # tokens, over all devices, whose logits exist at once


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Corpus, tokenizer and where prepared shards lie."""

  source: str = 'sample'
  tokenizer: str = 'bpe4k'
  mixture: tuple[tuple[str, float], ...] = ()  # (part, weight); () = by size
  dir: str = '~/.cache/gamma_jax/data'
  heldout_percent: float = 5.0  # of documents, by hash
  seed: int | None = None  # None: config.seed
  workers: int = 0  # grain worker processes


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices per mesh axis; -1 takes what is left."""

  data: int = -1
  fsdp: int = 1
  tensor: int = 1
  expert: int = 1


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When to save and what to keep."""

  every: int = 100
  keep: int = 2
  keep_every: int = 0  # additionally keep multiples of this for good; 0: none


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Held-out evaluation."""

  every: int = 0  # 0: only at the end
  batch_size: int = 16
  documents: int = 0  # first so many held-out documents; 0: all
  # Tasks are run by --mode=eval alone; see tasks/items.py.
  tasks: str = ''  # synth_cloze,hellaswag:FILE,gsm8k:FILE,...
  max_items: int = 0  # first so many of each task; 0: all
  shots: int = 0  # first so many are shown, solved, before each prompt
  new_tokens: int = 256  # most that are generated; at most half of seq_len
  temperature: float = 0.0  # 0: the likeliest token
  top_p: float = 1.0  # probability that the drawn tokens share
  sample_seed: int = 0  # of these draws


@dataclasses.dataclass(frozen=True)
class LogConfig:
  """Where numbers go besides metrics.jsonl."""

  every: int = 1
  mechanics: int = 3  # measures of weights and attention a decade; 0: none
  tensorboard: bool = False


@dataclasses.dataclass(frozen=True)
class SlurmConfig:
  """What each job asks SLURM for; launcher submitit."""

  partition: str = ''  # '': the cluster's default, as for account
  account: str = ''
  nodes: int = 1  # of one cell; above 1, one process a GPU
  gpus_per_node: int = 1
  timeout_min: int = 240
  array_parallelism: int = 16  # jobs at once


@dataclasses.dataclass(frozen=True)
class SweepConfig:
  """How a grid is run."""

  population: str = 'auto'  # auto | off | map | vmap: cells in one program
  fail_fast: bool = False
  launcher: str = 'local'  # local | print | submitit
  slurm: SlurmConfig = SlurmConfig()


@dataclasses.dataclass(frozen=True)
class PlanConfig:
  """What --mode=plan assumes; nothing else reads it."""

  target: str = ''  # v5e:8x8, h100:64, ...: compile for it, without it
  mfu: float = 0.4  # share of the chip's peak FLOP/s, a guess
  largest_batch: bool = False  # search for it: up to 8 compiles a shape


@dataclasses.dataclass(frozen=True)
class Config:
  """One cell."""

  seed: int = 0
  size: str = ''  # label of a size rung; names the cell, changes nothing
  platform: str = ''  # cpu | gpu | tpu; '' takes what JAX finds
  compile_cache: str = '~/.cache/gamma_jax/xla'  # '' compiles anew each time
  model: ModelConfig = ModelConfig()
  init: InitConfig = InitConfig()
  opt: OptConfig = OptConfig()
  train: TrainConfig = TrainConfig()
  data: DataConfig = DataConfig()
  mesh: MeshConfig = MeshConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  eval: EvalConfig = EvalConfig()
  log: LogConfig = LogConfig()
  sweep: SweepConfig = SweepConfig()
  plan: PlanConfig = PlanConfig()

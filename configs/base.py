"""Every field there is, with its default: a small decoder on the sample text.

  python -m gamma_jax.main --config=configs/base.py --workdir=runs/base

Trains one cell of 0.6 M parameters for 500 updates of 1024 tokens on the text
that comes with the package: about a minute on two CPU cores. Other configs
start from this one; any field can be set with --config.group.name=value.
"""

from ml_collections import config_dict

from configs import common


def get_config(arg=None):
  """The defaults; takes no argument."""
  common.parse_arg(arg)
  config = config_dict.ConfigDict()
  config.seed = 0  # of the draws, the data order and nothing else
  config.size = ''  # label of a size rung; names the cell, changes nothing
  config.platform = ''  # cpu | gpu | tpu; '' takes what JAX finds
  config.compile_cache = '~/.cache/gamma_jax/xla'  # '' compiles anew each time
  config.model = _model()
  config.init = _init()
  config.opt = _opt()
  config.train = _train()
  config.data = _data()

  config.mesh = mesh = config_dict.ConfigDict()
  mesh.data = -1  # devices that hold other rows; -1 takes what is left
  mesh.fsdp = 1  # devices that share weights and hold other rows
  mesh.tensor = 1  # devices that share heads, hidden units and vocabulary
  mesh.expert = 1  # devices that share experts and hold other rows

  config.checkpoint = checkpoint = config_dict.ConfigDict()
  checkpoint.every = 100  # updates between saves; the last is always saved
  checkpoint.keep = 2  # newest saves that stay
  checkpoint.keep_every = 0  # multiples of this stay for good; 0: none

  config.eval = evaluation = config_dict.ConfigDict()
  evaluation.every = 0  # updates between held-out evaluations; 0: at the end
  evaluation.batch_size = 16  # rows over all devices; changes no number
  evaluation.documents = 0  # first so many held-out documents; 0: all
  evaluation.tasks = ''  # also scored then: synth_cloze,hellaswag:FILE,...
  evaluation.max_items = 0  # first so many of each task; 0: all
  evaluation.shots = 0  # first so many are shown, solved, before each prompt
  evaluation.new_tokens = 256  # most to generate; at most half of seq_len
  evaluation.temperature = 0.0  # 0: the likeliest token
  evaluation.top_p = 1.0  # probability that the drawn tokens share
  evaluation.sample_seed = 0  # of these draws

  config.log = log = config_dict.ConfigDict()
  log.every = 1  # updates between lines of metrics.jsonl
  log.mechanics = 3  # condensation, sinks: at so many steps a decade; 0: none
  log.tensorboard = False  # also write TensorBoard files

  config.sweep = sweep = config_dict.ConfigDict()
  sweep.population = 'auto'  # cells in one program: auto | off | map | vmap
  sweep.fail_fast = False  # stop a grid at its first failed cell
  sweep.launcher = 'local'  # local | print (commands) | submitit (SLURM)
  sweep.slurm = slurm = config_dict.ConfigDict()
  slurm.partition = ''  # '': the cluster's default
  slurm.account = ''  # '': the cluster's default
  slurm.nodes = 1  # of one cell; above 1, one process a GPU
  slurm.gpus_per_node = 1  # of one cell
  slurm.timeout_min = 240  # minutes; a job that needs more is queued again
  slurm.array_parallelism = 16  # jobs at once

  config.plan = plan = config_dict.ConfigDict()
  plan.target = ''  # v5e:8x8, h100:64: --mode=plan compiles for these chips
  plan.mfu = 0.4  # share of a chip's peak that training is guessed to reach
  plan.largest_batch = False  # search for it: up to 8 compiles a shape
  return config


def _model():
  model = config_dict.ConfigDict()
  model.D = 64  # width of the residual stream
  model.F = 256  # hidden units of the MLP
  model.L = 4  # layers
  model.N = 4  # query heads
  model.K = 2  # kv heads; divides N
  model.H = 16  # channels of a head; even
  model.V = 4096  # rows of the embedding; at least the tokenizer's vocabulary
  model.mlp = 'swiglu'  # swiglu | gelu; balance at gamma 3/4 | 1
  model.gate = 'elementwise'  # of head outputs: none | headwise | elementwise
  model.norm_eps = 1e-12  # inside the square root of every RMSNorm
  model.qk_norm = False  # would hide the scale of q and k
  model.tied = False  # one matrix for embedding and head
  model.rope_theta = 10000.0  # base of the rotary frequencies
  model.scan = True  # False unrolls the same stacked parameters
  model.remat = 'none'  # what backward computes again: none | full | dots
  model.dtype = 'float32'  # of activations: float32 | bfloat16
  model.param_dtype = 'float32'  # of weights: float32 | bfloat16
  model.attention = 'blocks'  # blocks (any) | splash (TPU) | cudnn (GPU)
  model.attention_block = 512  # queries attended at once; attention blocks
  model.moe = moe = config_dict.ConfigDict()
  moe.experts = 0  # of every block, in place of its MLP; 0: the MLP
  moe.top_k = 2  # experts a token goes to
  moe.F = 0  # hidden units of one expert; 0: model.F
  moe.shared = 0  # experts that every token goes to, besides top_k
  moe.load_balance = 0.01  # weight of the balancing loss of each layer
  moe.router_z = 0.001  # weight of logsumexp(router logits)^2
  moe.bias_rate = 0.0  # step of the balancing bias; 0: no bias
  moe.dispatch = 'blocks'  # blocks | ragged (GPU, TPU) | dense (reference)
  moe.block = 128  # rows multiplied at once; dispatch blocks
  return model


def _init():
  init = config_dict.ConfigDict()
  init.rule = 'gamma'  # gamma|fixed|xavier|he|gpt2|megatron|small_wang
  init.gamma = 1.0  # std = d_in^-gamma
  init.std = 0.02  # of the rules that are told one
  init.distribution = 'normal'  # normal | truncated_normal
  init.depth_scale = False  # divide residual outputs by sqrt(2 L)
  init.down_fan_in = 'hidden'  # d_in of the MLP output: hidden (F) | model (D)
  init.overrides = overrides = config_dict.ConfigDict()
  overrides.embed = config_dict.placeholder(float)  # gamma; None: init.gamma
  overrides.head = config_dict.placeholder(float)  # output matrix
  overrides.qk = config_dict.placeholder(float)  # queries and keys
  overrides.vo = config_dict.placeholder(float)  # values and attention output
  overrides.gate = config_dict.placeholder(float)  # attention gate
  overrides.mlp = config_dict.placeholder(float)  # all of the MLP
  overrides.router = config_dict.placeholder(float)  # router of experts
  return init


def _opt():
  opt = config_dict.ConfigDict()
  opt.lr = 2e-3  # peak
  opt.b1 = 0.9  # AdamW: decay of the mean
  opt.b2 = 0.95  # AdamW: decay of the square
  opt.eps = 1e-8  # AdamW: added to the root
  opt.weight_decay = 0.1  # times lr; matrices only
  opt.clip = 1.0  # global gradient norm; 0 turns it off
  opt.warmup_steps = 50  # linear; below the length of the schedule
  opt.schedule = 'cosine'  # cosine | wsd | constant
  opt.schedule_steps = config_dict.placeholder(int)  # None: train.steps
  opt.final_lr_fraction = 0.1  # of the peak, at the end
  opt.wsd_decay_fraction = 0.2  # of the schedule, at its end
  return opt


def _train():
  train = config_dict.ConfigDict()
  train.steps = 500  # updates
  train.batch_size = 8  # rows an update, over all devices
  train.seq_len = 128  # tokens predicted in a row
  train.accumulation = 1  # parts a batch is computed in
  train.z_loss = 0.0  # weight of log(Z)^2
  train.loss_chunk = 512  # tokens whose logits exist at once
  return train


def _data():
  data = config_dict.ConfigDict()
  # synthetic | jsonl: | text: | parquet: | hf: | tfds: as in data/sources.py;
  # several are joined by +, so that a mixture can weigh parts of them all
  data.source = 'sample'  # or those, or anchor: a task, see configs/anchor.py
  data.tokenizer = 'bpe4k'  # bpe4k | bytes | a file | none (anchor)
  data.mixture = config_dict.ConfigDict()  # part: weight; empty: by size
  data.dir = '~/.cache/gamma_jax/data'  # where prepared tokens lie
  data.heldout_percent = 5.0  # of the documents, by hash
  data.seed = config_dict.placeholder(int)  # of the data order; None: seed
  data.workers = 0  # grain processes; another number is another order
  return data

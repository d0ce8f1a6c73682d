"""Generation with a cache: the same tokens as full forward passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gamma_jax import configure, decode, train_step
from gamma_jax import program as program_lib
from gamma_jax.config import (
  Config,
  ModelConfig,
  MoeConfig,
  TrainConfig,
)

MODEL = ModelConfig(D=16, F=24, L=2, N=4, K=2, H=4, V=40, attention_block=4)
TRAIN = TrainConfig(seq_len=16, loss_chunk=64)
EOT = 39
LENGTHS = (7, 1, 4)
NEW = 6


def system(**options):
  """(config, program, hyper, params, moe_state), drawn without a compile."""
  config = Config(model=dataclasses.replace(MODEL, **options), train=TRAIN)
  program = program_lib.build(
    configure.program_key(config), (jax.devices()[0],)
  )
  rng = np.random.default_rng(0)
  state = program.abstract_state

  # Far from an even prediction, so that no two logits are near a tie.
  def draw(x):
    return rng.normal(0.2, 0.3, x.shape).astype(x.dtype)

  params, moe_state = (
    jax.tree.map(draw, tree) for tree in (state.params, state.moe_state)
  )
  return config, program, train_step.hyper(config), params, moe_state


def prompts(lengths=LENGTHS, pad=0):
  rng = np.random.default_rng(0)
  tokens = np.full((len(lengths), max(lengths)), pad, np.int32)
  for row, n in zip(tokens, lengths):
    row[:n] = rng.integers(0, EOT, n)
  return {'tokens': tokens, 'lengths': np.array(lengths, np.int32)}


def generate(built, given, sampling=None, eot=EOT):
  """Tokens [B, NEW] in two calls, and the logits of the token after them."""
  _, program, h, params, moe_state = built
  at = (params, h, moe_state)
  slots = given['tokens'].shape[1] + NEW
  decoding = program.prefill(*at, program.put_batch(given), slots)
  out = []
  for _ in range(2):
    choice = (np.int32(eot), sampling)
    decoding, tokens = program.extend(*at, decoding, choice, NEW // 2)
    out.append(np.asarray(tokens))
  return np.concatenate(out, axis=1), np.asarray(decoding.logits)


def full_logits(built, rows):
  """Logits [T, V] of each row of tokens, by the plain forward pass."""
  config, _, h, params, moe_state = built
  lengths = np.array([len(row) for row in rows])
  tokens = np.zeros((len(rows), lengths.max()), np.int32)
  for into, row in zip(tokens, rows):
    into[: len(row)] = row
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)

  @jax.jit
  def forward(params, moe_state):
    return train_step.transformer(config).apply(
      {'params': params, 'moe_state': moe_state},
      tokens,
      (positions < lengths[:, None]).astype(np.int32),
      positions.astype(np.int32),
      h.norm_eps,
    )

  hidden, head = (np.asarray(x, 'float32') for x in forward(params, moe_state))
  return [(x @ head)[:n] for x, n in zip(hidden, lengths)]


SYSTEMS = [
  {'K': 4, 'gate': 'none', 'remat': 'full'},
  {'gate': 'headwise', 'tied': True, 'mlp': 'gelu', 'scan': False},
  {'qk_norm': True, 'K': 1, 'moe': MoeConfig(experts=4, F=8, bias_rate=0.1)},
]
MORE = [
  {},
  {'moe': MoeConfig(experts=4, F=8, shared=1), 'scan': False, 'tied': True},
]


@pytest.mark.parametrize(
  'options',
  [*SYSTEMS, *[pytest.param(more, marks=pytest.mark.slow) for more in MORE]],
)
def test_greedy_decoding_equals_the_full_forward_pass(options):
  built = system(**options)
  given = prompts()
  tokens, logits = generate(built, given, eot=-1)
  rows = zip(given['tokens'], LENGTHS, tokens)
  full = full_logits(built, [[*p[:length], *new] for p, length, new in rows])
  for row, length in enumerate(LENGTHS):
    want = full[row][length - 1 : -1].argmax(-1)
    assert tokens[row].tolist() == want.tolist()
    np.testing.assert_allclose(logits[row], full[row][-1], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope='module')
def built():
  return system(**SYSTEMS[0])


def test_rows_do_not_depend_on_padding_or_on_each_other(built):
  tokens, logits = generate(built, prompts())
  others, other_logits = generate(built, prompts(pad=11))
  np.testing.assert_array_equal(tokens, others)
  np.testing.assert_allclose(logits, other_logits, rtol=1e-5, atol=1e-5)
  given = {k: np.roll(v, 1, axis=0) for k, v in prompts().items()}
  np.testing.assert_array_equal(
    generate(built, given)[0], np.roll(tokens, 1, 0)
  )


def test_a_row_ends_at_eot_and_an_empty_one_at_once(built):
  free = generate(built, prompts(), eot=-1)[0]
  eot = int(free[0, 2])
  tokens, _ = generate(built, prompts(), eot=eot)
  for row, want in zip(tokens, free):
    ends = np.flatnonzero(want == eot)
    end = ends[0] if len(ends) else NEW
    assert row[:end].tolist() == want[:end].tolist()
    assert set(row[end:]) <= {eot}
  given = prompts()
  given['lengths'][1] = 0
  assert set(generate(built, given)[0][1]) == {EOT}


def sampling(seed=0, item=(0, 1, 2), temperature=1.0, top_p=1.0):
  return decode.Sampling(
    np.uint32(seed),
    np.array(item, np.uint32),
    np.float32(temperature),
    np.float32(top_p),
  )


def test_draws_belong_to_seed_and_item(built):
  given = prompts()
  tokens = generate(built, given, sampling())[0]
  turned = {k: v[::-1].copy() for k, v in given.items()}
  again = generate(built, turned, sampling(item=(2, 1, 0)))[0]
  np.testing.assert_array_equal(tokens, again[::-1])
  assert (tokens != generate(built, given, sampling(seed=1))[0]).any()
  greedy = generate(built, given)[0]
  for sure in (sampling(temperature=1e-4), sampling(top_p=1e-6)):
    np.testing.assert_array_equal(generate(built, given, sure)[0], greedy)


def test_draws_have_the_frequencies_of_the_nucleus():
  probs = np.array([0.5, 0.3, 0.15, 0.05])
  for top_p, want in [(1.0, probs), (0.6, np.array([0.625, 0.375, 0, 0]))]:
    draw = sampling(item=range(4000), top_p=top_p)
    rows = jnp.tile(jnp.log(jnp.float32(probs)), (4000, 1))
    tokens = np.asarray(jax.jit(decode.next_token)(rows, draw, jnp.int32(3)))
    got = np.bincount(tokens, minlength=4) / 4000
    np.testing.assert_allclose(got, want, atol=0.03)
    assert not got[want == 0].any()


@pytest.mark.slow
def test_bfloat16_decodes_near_the_full_forward_pass():
  # Sums of another order round to other bfloat16: close, not equal.
  built = system(dtype='bfloat16')
  given = prompts()
  tokens, logits = generate(built, given)
  (full,) = full_logits(built, [[*given['tokens'][0, :7], *tokens[0]]])
  assert np.abs(logits[0] - full[-1]).max() < 0.05 * np.abs(full).max()

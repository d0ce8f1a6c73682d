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
  InitConfig,
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
  """(config, program, hyper, state); gamma 0.5, so that no logits tie."""
  config = Config(
    model=dataclasses.replace(MODEL, **options),
    init=InitConfig(gamma=0.3),
    train=TRAIN,
  )
  program = program_lib.build(
    configure.program_key(config), (jax.devices()[0],)
  )
  return config, program, train_step.hyper(config), program.init(config)


def prompts(lengths=LENGTHS, pad=0):
  rng = np.random.default_rng(0)
  tokens = np.full((len(lengths), max(lengths)), pad, np.int32)
  for row, n in zip(tokens, lengths):
    row[:n] = rng.integers(0, EOT, n)
  return {'tokens': tokens, 'lengths': np.array(lengths, np.int32)}


def generate(built, given, sampling=None, eot=EOT, calls=(NEW,)):
  """Tokens [B, sum(calls)], and the logits of the token after them."""
  _, program, h, state = built
  at = (state.params, h, state.moe_state)
  given = program.put_batch(given)
  slots = given['tokens'].shape[1] + sum(calls)
  decoding = program.prefill(*at, given, slots)
  out = []
  for steps in calls:
    choice = (jnp.int32(eot), sampling)
    decoding, tokens = program.extend(*at, decoding, choice, steps)
    out.append(np.asarray(tokens))
  return np.concatenate(out, axis=1), np.asarray(decoding.logits)


def logits_of(built, row):
  """Logits [T, V] of one whole row, by the plain forward pass."""
  config, _, h, state = built
  row = np.array(row, np.int32)[None]
  positions = np.arange(row.shape[1], dtype=np.int32)[None]
  hidden, head = train_step.transformer(config).apply(
    {'params': state.params, 'moe_state': state.moe_state},
    row,
    np.ones_like(row),
    positions,
    h.norm_eps,
  )
  hidden = np.asarray(hidden[0], np.float32)
  return hidden @ np.asarray(head, np.float32)


@pytest.mark.parametrize(
  'options',
  [
    {'K': 4, 'gate': 'none'},
    {'gate': 'headwise', 'tied': True, 'mlp': 'gelu'},
    {'gate': 'elementwise', 'scan': False, 'qk_norm': True, 'K': 1},
    {'remat': 'full', 'moe': MoeConfig(experts=4, F=8, shared=1)},
    {'moe': MoeConfig(experts=4, F=8, bias_rate=0.1)},
  ],
)
def test_greedy_decoding_equals_the_full_forward_pass(options):
  built = system(**options)
  given = prompts()
  tokens, logits = generate(built, given, eot=-1, calls=(4, 2))
  for row, length in enumerate(LENGTHS):
    text = [*given['tokens'][row, :length], *tokens[row]]
    full = logits_of(built, text)
    want = full[length - 1 : -1].argmax(-1)
    assert tokens[row].tolist() == want.tolist()
    np.testing.assert_allclose(logits[row], full[-1], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope='module')
def built():
  return system()


def test_rows_do_not_depend_on_padding_or_on_each_other(built):
  tokens, logits = generate(built, prompts())
  padded = prompts(pad=11)
  wide = np.pad(padded['tokens'], [(0, 0), (0, 3)], constant_values=5)
  others, other_logits = generate(built, padded | {'tokens': wide})
  np.testing.assert_array_equal(tokens, others)
  np.testing.assert_allclose(logits, other_logits, rtol=1e-4, atol=1e-5)
  given = prompts()
  alone = {k: v[2:, ...] for k, v in given.items()}
  np.testing.assert_array_equal(generate(built, alone)[0], tokens[2:])


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
  split = generate(built, given, sampling(), calls=(1, 5))[0]
  np.testing.assert_array_equal(tokens, split)
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


def test_bfloat16_decodes_near_the_full_forward_pass():
  # Sums of another order round to other bfloat16: close, not equal.
  built = system(dtype='bfloat16')
  given = prompts()
  tokens, logits = generate(built, given)
  text = [*given['tokens'][0, : LENGTHS[0]], *tokens[0]]
  full = logits_of(built, text)
  assert np.abs(logits[0] - full[-1]).max() < 0.03 * np.abs(full).max()

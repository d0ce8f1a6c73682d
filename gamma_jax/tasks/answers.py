"""Is what a model wrote the right answer?"""

from __future__ import annotations

import re
from fractions import Fraction

from gamma_jax.errors import ConfigError

_NUMBER = re.compile(r'-?\d[\d,]*(?:\.\d+)?|-?\.\d+')


def exact(text: str, answer: str) -> bool:
  """Equal but for white space around it."""
  return text.strip() == answer.strip()


def final_number(text: str) -> Fraction | None:
  """The number after the last '####', else the last number there is."""
  _, mark, tail = text.rpartition('####')
  # '-$5' and '- 5' are numbers with a sign, '3-5' is none.
  cleaned = re.sub(r'(?<![\d)])-\s*\$?\s*(?=\.?\d)', '-', tail)
  cleaned = re.sub(r'(?<=\d)-', ' ', cleaned)
  found = _NUMBER.findall(cleaned)
  if not found:
    return None
  number = found[0 if mark else -1]
  return Fraction(number.replace(',', ''))


def number(text: str, answer: str) -> bool:
  """GSM8K: the final numbers are equal, as numbers."""
  want = final_number(answer)
  return want is not None and final_number(text) == want


def boxed(text: str) -> str | None:
  r"""What the last \boxed{...} holds, braces matched; None without."""
  start = text.rfind('\\boxed{')
  if start < 0:
    return None
  start += len('\\boxed{')
  depth = 1
  for i, char in enumerate(text[start:], start):
    depth += (char == '{') - (char == '}')
    if not depth:
      return text[start:i]
  return None


def need_math_verify() -> None:
  """Raises ConfigError unless `expression` can do its work."""
  try:
    import math_verify  # noqa: F401
  except ImportError as error:
    raise ConfigError(
      "eval.tasks: math500 needs math-verify: pip install 'gamma_jax[math]'"
    ) from error


def expression(text: str, answer: str) -> bool:
  r"""MATH: the last \boxed{...} is the same as a string, or as mathematics.

  Without a box nothing is right: a number somewhere in the text is no answer.
  """
  found = boxed(text)
  if found is None:
    return False
  if _tight(found) == _tight(answer):
    return True
  import math_verify  # an optional extra; need_math_verify was called

  got, want = (math_verify.parse(f'\\boxed{{{x}}}') for x in (found, answer))
  return bool(got and want and math_verify.verify(want, got))


def _tight(text: str) -> str:
  return re.sub(r'\s+', '', text).rstrip('.')

"""The string argument of a config file: `configs/X.py:mlp=gelu,seeds=2`.

Only for what changes several fields at once, or the grid; a single field is
set with --config.key=value.
"""


def parse_arg(arg, **defaults):
  """Reads `key=value,key,...` into a dict with the types of the defaults.

  A bool takes true or false, and a bare `key` means true. A tuple of strings
  takes `a+b`.

  Args:
    arg: the string, None or ''.
    **defaults: every key there is, with its default.

  Raises:
    ValueError: unknown key, a key given twice, or a value of another type.
  """
  found = {}
  for part in arg.split(',') if arg else []:
    key, equals, text = (word.strip() for word in part.partition('='))
    if key not in defaults:
      known = ', '.join(f'{k}={v!r}' for k, v in defaults.items()) or 'none'
      raise ValueError(f'unknown config argument {key!r}; there are: {known}')
    if key in found:
      raise ValueError(f'config argument {key} is given twice')
    found[key] = _value(key, text if equals else None, defaults[key])
  return {**defaults, **found}


def choice(key, value, allowed):
  """Returns `value`; ValueError where it is not allowed."""
  if value not in allowed:
    raise ValueError(
      f'config argument {key}={value} must be one of {", ".join(allowed)}'
    )
  return value


def numbers(key, words, kind=float):
  """The words of `a+b` as numbers of a kind; ValueError where one is none."""
  try:
    return [kind(word) for word in words]
  except ValueError:
    raise ValueError(
      f'config argument {key}={"+".join(words)} must be numbers: a+b'
    ) from None


def _value(key, text, default):
  kind = type(default)
  if kind is bool:
    if text not in (None, 'true', 'false'):
      raise ValueError(f'config argument {key}={text} must be true or false')
    return text != 'false'
  if not text:
    raise ValueError(f'config argument {key} needs a value: {key}={default!r}')
  if kind is tuple:
    return tuple(text.split('+'))
  try:
    return kind(text)
  except ValueError:
    raise ValueError(
      f'config argument {key}={text} is not of type {kind.__name__}'
    ) from None

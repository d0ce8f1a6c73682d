"""The few exceptions that carry an exit code (design: commands).

`main` turns each into one line on stderr and the code below; anything else is
a bug and keeps its traceback.
"""


class ConfigError(ValueError):
  """Bad input found before work starts. Exit code 2."""

  exit_code = 2


class Preempted(Exception):
  """SIGTERM came and the state was saved; run again to go on. Exit code 3."""

  exit_code = 3


class NonFiniteLoss(RuntimeError):
  """The loss or the gradient norm stopped being finite; names the step."""

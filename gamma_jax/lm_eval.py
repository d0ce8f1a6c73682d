"""lm-evaluation-harness with trained cells as a kind of model.

  python -m gamma_jax.lm_eval --model gamma_jax --model_args path=CELL \\
    --tasks TASK --batch_size 16

The harness cuts --model_args at commas: for the id of a cell of a grid, write
--model_args '{"path": "runs/grid/gamma=0.5,seed=0"}'.
The harness knows no models from outside but those that are registered before
its command line runs. This registers ours; all its flags work.
"""

from __future__ import annotations

import sys

from gamma_jax import errors


def main() -> int:
  """Returns the exit code; reads sys.argv, as the harness does."""
  try:
    from lm_eval.__main__ import cli_evaluate  # an optional extra
  except ImportError as error:
    print(
      "error: this needs the harness: pip install 'gamma_jax[lm-eval]' "
      f'({error})',
      file=sys.stderr,
    )
    return errors.ConfigError.exit_code
  from gamma_jax import lm_eval_model  # noqa: F401 (registers the model)

  try:
    cli_evaluate()
  except errors.ConfigError as error:
    print(f'error: {error}', file=sys.stderr)
    return error.exit_code
  return 0


if __name__ == '__main__':
  sys.exit(main())

"""Trains, plans, evaluates or reports a config or a grid.

  python -m gamma_jax.main --config=configs/X.py[:arg] --workdir=DIR
    [--config.key=value ...] [--mode=train|plan|report|eval] [--only=TEXT]

A config file with `sweep(add)` is a grid. A call with the same --workdir goes
on where the last one stopped. Exit codes: 0 done, 2 bad input, 3 preempted
after a good save, 4 some cells failed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence

from gamma_jax import command_line, errors, sweep

INTERRUPTED = 130  # what shells give for Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code; `argv` starts with the program's name."""
  _log_to_stderr()
  try:
    return _run(command_line.parse(sys.argv if argv is None else argv))
  except errors.ConfigError as error:
    print(f'error: {error}', file=sys.stderr)
    return error.exit_code
  except KeyboardInterrupt:
    print('interrupted; run the same command to go on', file=sys.stderr)
    return INTERRUPTED


def _run(command: command_line.Command) -> int:
  # What is imported here is slow to import, and bad flags must fail at once.
  if command.mode == 'help':
    print(f'{__doc__}\n{command.help}')
    return 0
  if command.mode == 'report':
    from gamma_jax import report

    report.write_report(command.workdir)
    return 0
  selected = sweep.select(command.cells, command.only)
  launcher = command.cells[0].config.sweep.launcher
  if command.mode == 'train' and launcher != 'local':
    return _launch(command, selected, launcher)
  from gamma_jax import distributed, platforms

  first = command.cells[0].config
  if command.mode == 'plan' and first.plan.target:
    # Before any device is looked for: the chips are not here.
    return _plan(command, selected)
  platforms.cache_compiles(first.compile_cache)
  joined = distributed.initialize(*command.processes)
  many = first.sweep.population != 'off' and len(command.cells) > 1
  if many and not joined:
    platforms.split_cpu()
  found = platforms.choose(first.platform)
  distributed.check()
  with contextlib.ExitStack() as stack:
    if not distributed.leads():  # one process speaks for all
      stack.enter_context(_silence())
    print(found, flush=True)
    return _work(command, selected)


def _work(command: command_line.Command, selected: Sequence[sweep.Cell]) -> int:
  if command.mode == 'plan':
    return _plan(command, selected)
  return _train(command) if command.mode == 'train' else _evaluate(command)


def _plan(command: command_line.Command, selected: Sequence[sweep.Cell]) -> int:
  from gamma_jax import plan_report

  plan_report.print_plan(selected, command.workdir)
  return 0


def _launch(command, selected: Sequence[sweep.Cell], launcher: str) -> int:
  from gamma_jax import launch

  for cell in command.cells:
    sweep.check_folder(cell, command.workdir)
  jobs = launch.commands(command.argv, selected, command.workdir)
  if launcher == 'print':
    launch.print_commands(jobs)
    return 0
  slurm = command.cells[0].config.sweep.slurm
  for job in launch.submit(jobs, command.workdir / 'slurm', slurm):
    print(job.job_id)
  return 0


def _train(command: command_line.Command) -> int:
  from gamma_jax import (
    configure,
    distributed,
    grouping,
    report,
    sharding,
    trainer,
  )

  for cell in command.cells:
    devices = sharding.devices_for(cell.config.mesh)
    configure.check_devices(cell.config, len(devices), devices[0].platform)
  cells, workdir, only = command.cells, command.workdir, command.only
  if not distributed.leads():
    return distributed.follow(cells, workdir, trainer.train)
  if distributed.alone():
    groups = grouping.Populations(workdir)
    code = sweep.run_sweep(cells, workdir, trainer.train, only, groups)
  else:
    leader = distributed.Leader(cells, trainer.train)
    code = leader.run(
      lambda: sweep.run_sweep(
        cells, workdir, leader.train, only, idle=leader.wait
      )
    )
  if code in (0, sweep.SOME_FAILED):
    report.write_report(workdir)
  return code


def _evaluate(command: command_line.Command) -> int:
  from gamma_jax import distributed, files, trainer
  from gamma_jax.tasks import runner

  found = {}
  for cell in sweep.select(command.cells, command.only):
    sweep.check_folder(cell, command.workdir)
    folder = command.workdir / cell.id
    found[cell.id] = trainer.evaluate_cell(cell.config, folder)
  text = runner.table(found)
  print(text, end='', flush=True)
  if distributed.leads():
    files.write_text(command.workdir / 'eval.txt', text)
  return 0


@contextlib.contextmanager
def _silence() -> Iterator[None]:
  """Nothing but warnings and errors."""
  logging.getLogger().setLevel(logging.WARNING)
  with open(os.devnull, 'w') as nowhere, contextlib.redirect_stdout(nowhere):
    yield


def _log_to_stderr() -> None:
  """Our own messages, and the warnings of others."""
  handler = logging.StreamHandler()
  handler.addFilter(
    lambda record: record.name == 'root' or record.levelno >= logging.WARNING
  )
  logging.basicConfig(
    format='%(message)s', level=logging.INFO, handlers=[handler]
  )


if __name__ == '__main__':
  sys.exit(main())

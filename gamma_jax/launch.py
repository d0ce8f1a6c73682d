"""Cells as jobs of a cluster: printed as commands, or sent to SLURM.

A job is the user's command for one cell. It goes on from the checkpoint of
that cell, so a scheduler may stop it (SIGTERM) and start it again at will.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gamma_jax.cell_folder import is_done
from gamma_jax.config import SlurmConfig
from gamma_jax.errors import ConfigError, Preempted

SAVE_SECONDS = 120  # from the signal to the end of a job
# These are set anew for each job.
_OURS = ('--only', '--config.sweep.launcher', '--config.sweep.population')


def commands(
  argv: Sequence[str], cells: Sequence, workdir: Path
) -> list[list[str]]:
  """The command of every cell that is not done.

  Args:
    argv: arguments of the user's command, without the program.
    cells: sweep.Cell objects that were asked for.
    workdir: of the sweep.
  """
  kept, skip = [], False
  for word in argv:
    flag = '--' + word.partition('=')[0].lstrip('-')
    if skip or flag in _OURS:
      skip = not skip and '=' not in word  # `--only TEXT`
    else:
      kept.append(word)
  return [
    [
      *('python', '-m', 'gamma_jax.main', *kept, f'--only={cell.id}'),
      '--config.sweep.launcher=local',
      '--config.sweep.population=off',
    ]
    for cell in cells
    if not is_done(workdir / cell.id)
  ]


def print_commands(jobs: Sequence[Sequence[str]]) -> None:
  """One line a cell, for any scheduler."""
  for job in jobs:
    print(shlex.join(job))


class Job:
  """Runs a command in a process of its own; what submitit pickles.

  On submitit's signal before the end of the time, or before a preemption, the
  command gets SIGTERM, saves and ends; then the job is put in the queue again.
  """

  def __init__(self, command: Sequence[str]):
    self._command = list(command)
    self._process: subprocess.Popen | None = None

  def __call__(self) -> None:
    self._process = subprocess.Popen([sys.executable, *self._command[1:]])
    code = self._process.wait()
    if code == Preempted.exit_code:
      # SLURM's own SIGTERM came first: ask submitit to put it in the queue.
      name = os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')
      os.kill(os.getpid(), getattr(signal, f'SIG{name}'))
      signal.pause()
    if code:
      raise RuntimeError(f'exit code {code} of {shlex.join(self._command)}')

  def checkpoint(self):
    """Called by submitit at its signal; returns what to run next."""
    import submitit

    process = self._process
    if process is not None and process.returncode is None:
      # Not process.wait(): this handler interrupts one, which holds its lock.
      with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(process.pid, signal.SIGTERM)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return submitit.helpers.DelayedSubmission(Job(self._command))


def submit(
  jobs: Sequence[Sequence[str]],
  folder: Path,
  slurm: SlurmConfig,
  cluster: str = 'slurm',
) -> list:
  """Sends the commands as one job array; returns submitit's jobs.

  Args:
    jobs: from `commands`.
    folder: for scripts and logs of the jobs.
    slurm: what to ask for.
    cluster: 'slurm', or 'local' for processes of this machine.

  Raises:
    ConfigError: submitit or SLURM is missing.
  """
  try:
    import submitit
  except ImportError as error:
    raise ConfigError(
      "sweep.launcher='submitit' needs submitit: pip install gamma_jax[slurm]"
    ) from error
  many = slurm.nodes > 1
  try:
    executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
  except (RuntimeError, ValueError) as error:
    raise ConfigError(
      "sweep.launcher='submitit' finds no SLURM here: submit from a login node"
    ) from error
  options = {
    'name': 'gamma_jax',
    'timeout_min': slurm.timeout_min,
    'nodes': slurm.nodes,
    'gpus_per_node': slurm.gpus_per_node,
    # JAX gives each of the processes of a node one GPU.
    'tasks_per_node': max(slurm.gpus_per_node, 1) if many else 1,
    'slurm_array_parallelism': slurm.array_parallelism,
    'slurm_signal_delay_s': SAVE_SECONDS,
  }
  if slurm.partition:
    options['slurm_partition'] = slurm.partition
  if slurm.account:
    options['slurm_account'] = slurm.account
  executor.update_parameters(**options)
  join = ['--coordinator=auto'] if many else []
  with executor.batch():
    sent = [executor.submit(Job([*job, *join])) for job in jobs]
  return sent

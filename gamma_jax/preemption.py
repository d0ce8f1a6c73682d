"""SIGTERM as a flag: what a scheduler sends before it takes a machine."""

from __future__ import annotations

import signal
import threading


class Preemption:
  """Turns SIGTERM into a flag that the loop reads between steps."""

  def __init__(self):
    self.asked = False
    self._old = None

  def __enter__(self):
    # Handlers can only be set from the main thread; elsewhere (a notebook's
    # worker) preemption stays the caller's business.
    if threading.current_thread() is threading.main_thread():
      self._old = signal.signal(signal.SIGTERM, self._ask)
    return self

  def _ask(self, *_):
    self.asked = True

  def __exit__(self, *_):
    if self._old is not None:
      signal.signal(signal.SIGTERM, self._old)

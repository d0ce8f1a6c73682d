"""metrics.jsonl holds each step once, whatever killed the run."""

import csv
import json
import math
import struct
import sys

import pytest

from gamma_jax import errors, metric_writer


def _write(path, steps, resume_step=None):
  writer = metric_writer.JsonlWriter(path, resume_step)
  for step in steps:
    writer.write(step, {'train/loss': 10.0 / step})
  writer.close()


def test_a_line_is_on_disk_at_once(tmp_path):
  writer = metric_writer.JsonlWriter(tmp_path / 'run' / 'metrics.jsonl')
  writer.write(1, {'train/loss': 2.5, 'data/crc': 7})
  assert (tmp_path / 'run' / 'metrics.jsonl').read_text() == (
    '{"step": 1, "train/loss": 2.5, "data/crc": 7}\n'
  )
  writer.close()
  writer.close()


@pytest.mark.parametrize('step', [3, 2])
def test_steps_must_grow(tmp_path, step):
  path = tmp_path / 'metrics.jsonl'
  _write(path, [1, 2, 3])
  writer = metric_writer.JsonlWriter(path)
  with pytest.raises(ValueError, match=f'step {step} after step 3'):
    writer.write(step, {})
  writer.close()


@pytest.mark.parametrize('torn', ['', '{"step": 6, "tr', '\0\0\0', '{'])
@pytest.mark.parametrize('resume_step', [0, 2, 5, 9])
def test_killed_and_resumed_equals_undisturbed(tmp_path, torn, resume_step):
  straight, broken = tmp_path / 'a.jsonl', tmp_path / 'b.jsonl'
  _write(straight, range(1, 11))
  _write(broken, range(1, 6))
  with open(broken, 'a') as f:
    f.write(torn)
  last = min(resume_step, 5)
  _write(broken, range(last + 1, 11), resume_step)
  assert broken.read_bytes() == straight.read_bytes()


def test_whole_last_line_without_newline_is_kept(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n{"step": 2}')
  _write(path, [3])
  assert [m['step'] for m in metric_writer.read_metrics(path)] == [1, 2, 3]


def test_damage_in_the_middle_is_not_hidden(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
  with pytest.raises(errors.ConfigError, match='line 2 is not JSON'):
    metric_writer.JsonlWriter(path)


def test_strict_json_and_back_for_what_is_not_finite(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  values = {'a': math.nan, 'b': math.inf, 'c': -math.inf, 'd': 1e-30}
  writer = metric_writer.JsonlWriter(path)
  writer.write(0, values)
  writer.close()

  def refuse(name):
    raise AssertionError(f'{name} is not JSON')

  json.loads(path.read_text(), parse_constant=refuse)
  (back,) = metric_writer.read_metrics(path)
  assert math.isnan(back.pop('a'))
  assert back == {'step': 0, 'b': math.inf, 'c': -math.inf, 'd': 1e-30}


def test_a_run_at_work_can_be_read(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n{"step": 2, "trai')
  assert metric_writer.read_metrics(path) == [{'step': 1}]
  path.write_text('')
  assert metric_writer.read_metrics(path) == []


def test_csv_has_the_union_of_columns(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  writer = metric_writer.JsonlWriter(path)
  writer.write(1, {'train/loss': 0.1})
  writer.write(2, {'train/loss': 0.2, 'heldout/loss': math.nan})
  writer.close()
  metric_writer.to_csv(path, tmp_path / 'metrics.csv')
  with open(tmp_path / 'metrics.csv', newline='') as f:
    table = list(csv.reader(f))
  assert table == [
    ['step', 'train/loss', 'heldout/loss'],
    ['1', '0.1', ''],
    ['2', '0.2', 'nan'],
  ]


class _Recorder:
  def __init__(self, fail=False):
    self.lines, self.closed, self._fail = [], False, fail

  def write(self, step, metrics):
    self.lines.append((step, metrics))

  def close(self):
    self.closed = True
    if self._fail:
      raise OSError('disk full')


def test_multi_closes_all_even_when_one_fails():
  first, second = _Recorder(fail=True), _Recorder(fail=True)
  multi = metric_writer.MultiWriter([first, second])
  multi.write(4, {'a': 1.0})
  assert first.lines == second.lines == [(4, {'a': 1.0})]
  with pytest.raises(OSError, match='disk full'):
    multi.close()
  assert first.closed and second.closed


def _events(folder):
  """(step, tag, value) of each scalar, and the steps of session starts."""
  from tensorboardX.proto import event_pb2

  scalars, starts = [], []
  for path in sorted(folder.iterdir()):
    data = path.read_bytes()
    while data:
      (size,) = struct.unpack('<Q', data[:8])
      event = event_pb2.Event.FromString(data[12 : 12 + size])
      data = data[12 + size + 4 :]
      if event.session_log.status == event_pb2.SessionLog.START:
        starts.append(event.step)
      for value in event.summary.value:
        scalars.append((event.step, value.tag, value.simple_value))
  return scalars, starts


def test_tensorboard_scalars_and_purge(tmp_path):
  pytest.importorskip('tensorboardX')
  writer = metric_writer.TensorBoardWriter(tmp_path)
  writer.write(1, {'train/loss': 2.5})
  writer.close()
  assert _events(tmp_path) == ([(1, 'train/loss', 2.5)], [])
  writer = metric_writer.TensorBoardWriter(tmp_path, resume_step=40)
  writer.close()
  assert _events(tmp_path)[1] == [41]


def test_missing_tensorboard_names_the_extra(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'tensorboardX', None)
  with pytest.raises(errors.ConfigError, match=r'gamma_jax\[tb\]'):
    metric_writer.TensorBoardWriter(tmp_path)

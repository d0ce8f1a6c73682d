"""What the figures of mechanics show: where, when and of which step."""

import numpy as np

from gamma_jax import (
  condense_plot,
  report_plot_layers,
  report_plot_traces,
  results,
)
from tests import fake_sweep


def test_measures_stand_at_the_tokens_seen_by_then(tmp_path):
  fake_sweep.write(tmp_path, [{'init.gamma': 1.0}], steps=12, traces=True)
  (arm,) = results.summarize(results.collect(tmp_path))
  trace = report_plot_traces.traces(arm)
  steps, _ = trace['condense/stable_rank']['q']
  np.testing.assert_array_equal(steps, [0, 1, 2, 5, 10])
  tokens = report_plot_traces._tokens(trace, steps)
  np.testing.assert_array_equal(tokens, 1024 * steps)


def test_sinks_by_layer_are_those_of_the_last_measured_step(tmp_path):
  fake_sweep.write(tmp_path, [{'init.gamma': 0.5}], steps=120, traces=True)
  (arm,) = results.summarize(results.collect(tmp_path))
  shares, floor = report_plot_layers.by_layer(arm)
  last = fake_sweep.measured(0.5, 100)  # 120 is not one of its steps
  want = [last[f'sink/share/{layer}/0'] for layer in range(2)]
  np.testing.assert_allclose(shares, want)
  assert floor == last['sink/uniform_floor']


def test_a_sweep_without_mechanics_has_no_such_figure(tmp_path):
  fake_sweep.write(tmp_path, [{'init.gamma': 0.5}], steps=2)
  (arm,) = results.summarize(results.collect(tmp_path))
  assert report_plot_layers.by_layer(arm) is None


def test_cells_are_named_by_what_tells_them_apart():
  cells = ['L=2,gamma=0.5,seed=0', 'L=2,gamma=1.0,seed=0']
  assert condense_plot.short_names(cells) == ['gamma=0.5', 'gamma=1.0']
  assert condense_plot.short_names(cells[:1]) == ['']

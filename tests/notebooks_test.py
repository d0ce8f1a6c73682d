"""Every notebook runs top to bottom, and is kept without outputs."""

import json
import pathlib

import pytest

NOTEBOOKS = sorted(
  (pathlib.Path(__file__).parent.parent / 'notebooks').glob('*.ipynb')
)


def code_cells(path):
  cells = json.loads(path.read_text(encoding='utf-8'))['cells']
  return [cell for cell in cells if cell['cell_type'] == 'code']


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_kept_without_outputs_and_with_a_badge(path):
  cells = code_cells(path)
  assert cells
  for cell in cells:
    assert cell['outputs'] == [] and cell['execution_count'] is None
  text = path.read_text(encoding='utf-8')
  assert f'notebooks/{path.name}' in text  # the badge opens this notebook
  assert '--upgrade' not in text and 'pip install -U' not in text


def test_there_are_three():
  names = [path.stem for path in NOTEBOOKS]
  assert names == ['own_model', 'read_a_sweep', 'small_scale']


@pytest.mark.slow
def test_all_run_in_one_folder(tmp_path, monkeypatch):
  import nbclient
  import nbformat

  # In this order: one reads the grid that another has trained.
  for stem in ('own_model', 'small_scale', 'read_a_sweep'):
    (path,) = (p for p in NOTEBOOKS if p.stem == stem)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
      notebook,
      timeout=1800,
      kernel_name='python3',
      resources={'metadata': {'path': str(tmp_path)}},
    ).execute()
    errors = [
      output
      for cell in notebook.cells
      for output in cell.get('outputs', ())
      if output.output_type == 'error'
    ]
    assert not errors

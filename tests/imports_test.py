"""Who may import whom, and how long things may be, read from the source."""

import ast
import graphlib
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_FILE, MAX_FUNCTION = 350, 60

# Copied into an export to run in another program, with torch and without us:
# a text file of this package rather than a module, in a folder that is none.
SHIPPED = 'gamma_jax/hf_template/modeling_gamma.py'

# Only these files may import these packages.
OWNERS = {
  'lm_eval': {'gamma_jax/lm_eval.py', 'gamma_jax/lm_eval_model.py'},
  'orbax': {'gamma_jax/checkpoint.py'},
  'safetensors': {'gamma_jax/export.py'},
  'tensorboardX': {'gamma_jax/metric_writer.py'},
  'tensorflow': set(),
  'torch': set(),
  'wandb': set(),
}
# These sit low: neither they nor what they import may know the loop.
LOW = (
  'attention',
  'decode',
  'init_rules',
  'initializers',
  'layers',
  'losses',
  'metrics',
  'mlp',
  'model',
  'moe',
  'optim',
  'shapes',
  'sharding',
  'train_state',
  'train_step',
)
LOOP = {'trainer', 'sweep', 'report', 'main', 'tokens'}
NO_FLAX = ('audit_tree', 'initializers', 'redraw', 'shapes', 'tree_rules')
NO_JAX = (
  'chips',
  'command_line',
  'config',
  'configure',
  'data.workers',
  'errors',
  'files',
  'hf_layout',
  'hf_tokenizer',
  'limits',
  'limits_data',
  'metric_writer',
  'report',
  'results',
  'sweep',
  'tasks.items',
  'token_page',
  'token_rows',
)


def sources(*folders):
  """'gamma_jax/mlp.py' -> its text."""
  return {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding='utf-8')
    for folder in folders
    for path in sorted((ROOT / folder).rglob('*.py'))
    if path != ROOT / SHIPPED
  }


def imports(text, late=True):
  """Dotted names that a file imports; `late`: inside functions too."""
  found, nodes = set(), list(ast.parse(text).body)
  while nodes:
    node = nodes.pop()
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = '.' * node.level + (node.module or '')
      found |= {f'{base}.{alias.name}' for alias in node.names}
    elif late or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
      nodes += ast.iter_child_nodes(node)
  return found


def packages(text):
  """First words of what a file imports."""
  return {name.split('.')[0] for name in imports(text)}


def graph(files, late=True):
  """Module of gamma_jax -> modules of gamma_jax that it imports."""
  names = {
    path.removesuffix('.py').removesuffix('/__init__').replace('/', '.'): text
    for path, text in files.items()
  }
  edges = {}
  for name, text in names.items():
    edges[name] = set()
    for target in imports(text, late):
      # `from gamma_jax.config import Config` names a thing in a module.
      while target and target not in names:
        target = target.rpartition('.')[0]
      if target not in ('', 'gamma_jax', name):
        edges[name].add(target)
  return edges


def reach(edges, start):
  """All that `start` imports, directly or not."""
  seen, todo = set(), [start]
  while todo:
    for target in edges.get(todo.pop(), ()):
      if target not in seen:
        seen.add(target)
        todo.append(target)
  return seen


def owner_offences(files):
  return [
    f'{path} imports {package}'
    for path, text in files.items()
    for package in packages(text) & set(OWNERS)
    if path not in OWNERS[package]
  ]


def loop_offences(files):
  edges = graph(files)
  return [
    f'{low} reaches {target}'
    for low in LOW
    for target in reach(edges, f'gamma_jax.{low}')
    if target.removeprefix('gamma_jax.') in LOOP
  ]


def package_offences(files, modules, package):
  """`modules` that import `package` at their top, directly or not."""
  edges = graph(files, late=False)
  offences = []
  for module in modules:
    for name in {f'gamma_jax.{module}', *reach(edges, f'gamma_jax.{module}')}:
      text = files.get(f'{name.replace(".", "/")}.py', '')
      tops = {target.split('.')[0] for target in imports(text, late=False)}
      if package in tops:
        offences.append(f'{module}: {name} imports {package}')
  return offences


def config_offences(files):
  allowed = {'ml_collections', 'configs', *sys.stdlib_module_names}
  return [
    f'{path} imports {package}'
    for path, text in files.items()
    for package in packages(text) - allowed
  ]


def length_offences(files):
  offences = []
  for path, text in files.items():
    lines = len(text.splitlines())
    if lines > MAX_FILE:
      offences.append(f'{path}: {lines} lines')
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        lines = node.end_lineno - node.lineno + 1
        if lines > MAX_FUNCTION:
          offences.append(f'{path}: {node.name} has {lines} lines')
  return offences


def test_only_owners_import_what_they_wrap():
  assert not owner_offences(sources('gamma_jax', 'configs', 'experiments'))


def test_low_modules_do_not_know_the_loop():
  assert not loop_offences(sources('gamma_jax'))


def test_initializers_need_no_flax():
  assert not package_offences(sources('gamma_jax'), NO_FLAX, 'flax')


def test_disk_side_needs_no_jax():
  assert not package_offences(sources('gamma_jax'), NO_JAX, 'jax')


def test_no_cycles():
  edges = graph(sources('gamma_jax'), late=False)
  list(graphlib.TopologicalSorter(edges).static_order())  # raises CycleError


def test_library_does_not_import_configs_or_experiments():
  assert not [
    path
    for path, text in sources('gamma_jax').items()
    if packages(text) & {'configs', 'experiments', 'tests'}
  ]


def test_configs_import_ml_collections_only():
  assert not config_offences(sources('configs'))


def test_imports_are_absolute():
  # The other tests read dotted names from the left.
  assert not [
    path
    for path, text in sources('gamma_jax', 'configs', 'experiments').items()
    if any(name.startswith('.') for name in imports(text))
  ]


def test_every_package_folder_will_be_installed():
  folders = {(ROOT / path).parent for path in sources('gamma_jax', 'configs')}
  assert not [f for f in folders if not (f / '__init__.py').exists()]


def test_the_shipped_file_knows_nothing_of_us_and_we_do_not_import_it():
  text = (ROOT / SHIPPED).read_text(encoding='utf-8')
  assert packages(text) == {'torch', 'transformers'}
  assert not length_offences({SHIPPED: text})
  folder = (ROOT / SHIPPED).parent
  assert not [
    path
    for path, text in sources('gamma_jax').items()
    if any(folder.name in name for name in imports(text))
  ]
  assert [p.name for p in folder.iterdir() if p.suffix] == [
    pathlib.Path(SHIPPED).name
  ]


def test_files_and_functions_stay_short():
  assert not length_offences(sources('gamma_jax', 'configs', 'experiments'))


@pytest.mark.parametrize(
  ('check', 'files', 'offence'),
  [
    (
      owner_offences,
      {'gamma_jax/mlp.py': 'def f():\n  import orbax.checkpoint as o'},
      'gamma_jax/mlp.py imports orbax',
    ),
    (
      loop_offences,
      {
        'gamma_jax/losses.py': 'from gamma_jax import x',
        'gamma_jax/x.py': 'from gamma_jax.trainer import train',
        'gamma_jax/trainer.py': '',
      },
      'losses reaches gamma_jax.trainer',
    ),
    (
      lambda files: package_offences(files, NO_FLAX, 'flax'),
      {
        'gamma_jax/initializers.py': 'from gamma_jax import x',
        'gamma_jax/x.py': 'import flax.linen as nn',
      },
      'initializers: gamma_jax.x imports flax',
    ),
    (
      config_offences,
      {'configs/a.py': 'import math\nimport jax\nfrom configs import base'},
      'configs/a.py imports jax',
    ),
    (
      length_offences,
      {'gamma_jax/a.py': 'def f():\n' + '  x = 1\n' * 60},
      'gamma_jax/a.py: f has 61 lines',
    ),
    (
      length_offences,
      {'gamma_jax/a.py': '\n' * 351},
      'gamma_jax/a.py: 351 lines',
    ),
  ],
)
def test_the_checks_can_fail(check, files, offence):
  assert check(files) == [offence]


def test_cycles_are_found():
  edges = graph(
    {
      'gamma_jax/a.py': 'from gamma_jax import b',
      'gamma_jax/b.py': 'from gamma_jax.a import f',
    },
    late=False,
  )
  with pytest.raises(graphlib.CycleError):
    list(graphlib.TopologicalSorter(edges).static_order())

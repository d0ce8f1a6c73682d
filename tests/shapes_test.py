"""Fan-in from equations."""

import pytest

from gamma_jax import shapes


@pytest.mark.parametrize(
  'equation, shape, fan_in, fan_out',
  [
    ('BTD,DF->BTF', (512, 2048), 512, 2048),
    ('BTD,DNH->BTNH', (512, 8, 64), 512, 512),
    ('BTNH,NHD->BTD', (8, 64, 512), 512, 512),
    ('BTD,DN->BTN', (512, 8), 512, 8),
    ('EBCD,EDF->EBCF', (8, 512, 1024), 512, 1024),
    ('EBCF,EFD->EBCD', (8, 1024, 512), 1024, 512),
  ],
)
def test_fans_follow_the_equation(equation, shape, fan_in, fan_out):
  assert shapes.weight_axes(equation).fans(shape) == (fan_in, fan_out)


@pytest.mark.parametrize(
  'equation, message',
  [
    ('BTD->BTD', 'not of the form'),
    ('BTD,DF', 'not of the form'),
    ('BD,DF,FG->BG', 'not of the form'),
    ('BD,DD->B', 'repeats'),
    ('BD,DZ->B', 'alone'),
  ],
)
def test_bad_equations_are_errors(equation, message):
  with pytest.raises(ValueError, match=message):
    shapes.weight_axes(equation)


@pytest.mark.parametrize(
  'axes',
  [
    shapes.Axes(0, 1),  # axis 2 is not named
    shapes.Axes((0, 1), (1, 2)),  # axis 1 twice
    shapes.Axes(0, (1, 3)),  # out of range
  ],
)
def test_axes_must_cover_the_shape_exactly(axes):
  with pytest.raises(ValueError, match='axis|axes|Axes'):
    axes.fans((4, 5, 6))


def test_a_single_axis_may_be_an_integer():
  assert shapes.Axes(0, [1], 2) == shapes.Axes((0,), (1,), (2,))
  assert shapes.Axes(0, 1).fans((3, 4)) == (3, 4)

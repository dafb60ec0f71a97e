"""Where the lines of operands lie that broadcast to rows, and which shapes do."""

import re

import pytest
import torch

from kda_runtime.broadcast import Form, Placed, check_operands, formless, per_token, placed, row_stride
from kda_runtime.checks import expecting


@pytest.mark.parametrize(
    ("shape", "stride", "step"),
    [
        ((4, 128), (128, 1), 128),
        ((4, 128), (160, 1), 160),
        ((1, 128), (999, 1), 128),
        ((2, 3, 128), (480, 160, 1), 160),
        ((2, 1, 128), (160, 999, 1), 160),
        ((2, 3, 128), (999, 128, 1), None),
        ((128,), (1,), 128),
    ],
)
def test_step_between_rows(shape, stride, step):
    assert row_stride(torch.empty_strided(shape, stride, device="meta")) == step


@pytest.mark.parametrize(
    ("shape", "batch", "tokens", "expected"),
    [
        ((), 2, 6, Placed(Form("one", 0, False), None)),
        ((1,), 2, 6, Placed(Form("one", 0, False), None)),
        ((96,), 2, 6, Placed(Form("one", 0, True), None)),
        ((2, 96), 2, 6, Placed(Form("groups", 96, True), 6)),
        ((1, 96), 2, 6, Placed(Form("one", 0, True), None)),
        ((2, 6, 96), 2, 6, Placed(Form("rows", 96, True), None)),
        ((1, 6, 96), 2, 6, Placed(Form("cycle", 96, True), 6)),
        ((1, 6, 96), 1, 6, Placed(Form("rows", 96, True), None)),
        ((2, 6, 1), 2, 6, Placed(Form("rows", 1, False), None)),
        ((2, 3, 1, 96), 2, 6, Placed(Form("groups", 96, True), 2)),
        ((2, 6, 1, 96), 2, 6, Placed(Form("rows", 96, True), None)),
        ((2, 1, 1, 96), 2, 6, Placed(Form("groups", 96, True), 6)),
    ],
)
def test_forms(shape, batch, tokens, expected):
    assert placed(torch.empty(shape), batch, tokens) == expected


def strided(shape, stride):
    return torch.empty_strided(shape, stride, device="meta")


@pytest.mark.parametrize(
    ("operand", "expected"),
    [
        (strided((2, 6, 96), (6 * 576, 576, 1)), Placed(Form("rows", 576))),  # one of six chunks
        (strided((2, 96), (576, 1)), Placed(Form("groups", 576), 6)),
        (strided((2, 6, 96), (0, 96, 1)), Placed(Form("cycle", 96), 6)),
        (strided((2, 6, 96), (96, 0, 1)), Placed(Form("groups", 96), 6)),
        (strided((2, 6, 96), (0, 0, 0)), Placed(Form("one", across=False))),
        (strided((2, 6, 96), (1, 2, 12)), None),
        (strided((2, 6, 96), (1200, 96, 1)), None),  # batches further apart than their lines ask for
        (strided((2, 3, 1, 96), (0, 96, 96, 1)), None),  # the same frames for both batches
    ],
)
def test_forms_of_strided_operands(operand, expected):
    assert placed(operand, 2, 6) == expected


@pytest.mark.parametrize(
    "shape", [(), (1,), (96,), (2, 1), (1, 96), (2, 6, 1), (1, 1, 96), (2, 3, 1, 96), (1, 1, 1, 1)]
)
def test_shapes_that_broadcast(shape):
    check_operands(expecting("op"), {"scale": torch.empty(shape)}, (2, 6, 96))
    torch.broadcast_shapes(per_token(torch.empty(shape), 6).shape, (2, 6, 96))  # raises where it does not


@pytest.mark.parametrize(
    ("shape", "expected", "came"),
    [
        ((95,), "a shape that broadcasts to [96]", [95]),
        ((3, 96), "a shape that broadcasts to [2, 96]", [3, 96]),
        ((2, 5, 96), "a shape that broadcasts to [2, 6, 96]", [2, 5, 96]),
        ((2, 4, 1, 96), "frames that divide the 6 tokens of x", 4),
        ((2, 0, 1, 96), "frames that divide the 6 tokens of x", 0),
        ((2, 3, 2, 96), "a shape that broadcasts to [2, 3, 1, 96]", [2, 3, 2, 96]),
        ((1, 1, 1, 1, 96), "at most four dimensions", [1, 1, 1, 1, 96]),
    ],
)
def test_shapes_that_do_not(shape, expected, came):
    with pytest.raises(ValueError, match=re.escape(f"op: scale: expected {expected}, got {came}")):
        check_operands(expecting("op"), {"scale": torch.empty(shape)}, (2, 6, 96))


def test_frames_are_repeated_for_their_tokens():
    frames = torch.arange(6.0).view(2, 3, 1, 1)
    assert per_token(frames, 6)[..., 0].tolist() == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5]]
    assert per_token(torch.empty(2, 96), 6).shape == (2, 1, 96)
    assert per_token(torch.empty(96), 6).shape == (96,)


def test_an_operand_without_a_form_is_named():
    operands = {"scale": torch.empty(96), "shift": strided((2, 6, 96), (1, 2, 12))}
    reason = "shift has shape [2, 6, 96] and strides (1, 2, 12), for which there is no form"
    assert formless(operands, 2, 6) == reason
    assert formless({"scale": operands["scale"]}, 2, 6) is None

"""Changes of colour of a whole batch, where every sample has its own factor.

Each function does to every sample what torchvision's function of the same name does to one, for floats between 0 and 1.

Legend:  N samples, C = 3 channels, H and W height and width.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Luminance of red, green and blue as torchvision has it.
_LUMINANCE = (0.2989, 0.587, 0.114)

# Half way between the grey levels 127 and 128 of 255: rounding cannot push a pixel across.
_SOLARISE_THRESHOLD = 0.5

# Columns of a table of jitters.
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)


def luminance(x_NCHW: Tensor) -> Tensor:
    """The grey image of each colour image, N x 1 x H x W."""
    red, green, blue = x_NCHW.split(1, dim=1)
    return torch.add(red * _LUMINANCE[0], green, alpha=_LUMINANCE[1]).add_(blue, alpha=_LUMINANCE[2])


def adjust_brightness(x_NCHW: Tensor, factor_N: Tensor) -> Tensor:
    """Multiply every pixel by its image's factor."""
    return (x_NCHW * _spread(factor_N)).clamp_(0.0, 1.0)


def adjust_contrast(x_NCHW: Tensor, factor_N: Tensor) -> Tensor:
    """Move every pixel away from its image's mean grey, by its image's factor."""
    return blend(x_NCHW, luminance(x_NCHW).mean(dim=(1, 2, 3), keepdim=True), factor_N)


def adjust_saturation(x_NCHW: Tensor, factor_N: Tensor) -> Tensor:
    """Move every pixel away from its own grey, by its image's factor."""
    return blend(x_NCHW, luminance(x_NCHW), factor_N)


def blend(x_NCHW: Tensor, target: Tensor, factor_N: Tensor) -> Tensor:
    """factor x + (1 - factor) target, kept between 0 and 1: the one formula of brightness, contrast and saturation."""
    factor = _spread(factor_N)
    return (x_NCHW * factor).add_(target * (1.0 - factor)).clamp_(0.0, 1.0)


def adjust_hue(x_NCHW: Tensor, shift_N: Tensor) -> Tensor:
    """Turn the hue of every pixel by its image's share of the circle, at the same saturation and value (HSV)."""
    red, green, blue = x_NCHW.unbind(dim=1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    per_chroma = torch.where(chroma == 0, 1.0, chroma).reciprocal_()
    # The hue in sixths of the circle; red is at 0, green at 2, blue at 4.
    from_red = (green - blue).mul_(per_chroma)
    from_green = (blue - red).mul_(per_chroma).add_(2.0)
    from_blue = (red - green).mul_(per_chroma).add_(4.0)
    hue = torch.where(value == red, from_red, torch.where(value == green, from_green, from_blue))
    hue = hue.add_(6.0 * shift_N[:, None, None])

    def channel(opposite: float) -> Tensor:
        # A channel is at its lowest within a sixth of the circle around its opposite colour, at its highest beyond two.
        distance = hue - opposite
        distance = distance.sub_(torch.round(distance * (1 / 6)).mul_(6.0)).abs_()
        return value - distance.neg_().add_(2.0).clamp_(0.0, 1.0).mul_(chroma)

    return torch.stack([channel(3.0), channel(5.0), channel(1.0)], dim=1)


def grey(x_NCHW: Tensor) -> Tensor:
    """Take the colours away, and keep three channels."""
    return luminance(x_NCHW).expand_as(x_NCHW)


def solarise(x_NCHW: Tensor) -> Tensor:
    """Invert the pixels whose value is in the upper half."""
    return torch.where(x_NCHW >= _SOLARISE_THRESHOLD, 1.0 - x_NCHW, x_NCHW)


def jitter_by_masks(x_NCHW: Tensor, jitter_N: Tensor, turn_N4: Tensor, factor_N4: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue of each sample in its own order, without looking at any number.

    ``turn_N4`` says when each of the four comes, ``factor_N4`` by how much. The hue is the dearest and comes once a
    sample: so every sample first has those of its changes that come before the hue, then the hue, then the others. A
    change that is not due has the factor 1.
    """
    hue_turn_N = turn_N4[:, HUE]
    for slot in range(3):
        x_NCHW = _linear_slot(x_NCHW, slot, jitter_N & (hue_turn_N > slot), turn_N4, factor_N4)
    x_NCHW = torch.where(_spread(jitter_N), adjust_hue(x_NCHW, factor_N4[:, HUE]), x_NCHW)
    for slot in range(1, 4):
        x_NCHW = _linear_slot(x_NCHW, slot, jitter_N & (hue_turn_N < slot), turn_N4, factor_N4)
    return x_NCHW


def _linear_slot(x_NCHW: Tensor, slot: int, active_N: Tensor, turn_N4: Tensor, factor_N4: Tensor) -> Tensor:
    """Do the change whose turn it is, for the active samples; it must not be the hue's."""
    due_N4 = (turn_N4 == slot) & active_N[:, None]
    factor_N = torch.where(due_N4, factor_N4, 1.0)[:, :HUE].prod(dim=1)
    grey_N1HW = luminance(x_NCHW)
    target = torch.where(_spread(due_N4[:, CONTRAST]), grey_N1HW.mean(dim=(1, 2, 3), keepdim=True), grey_N1HW)
    target = torch.where(_spread(due_N4[:, BRIGHTNESS]), 0.0, target)
    return blend(x_NCHW, target, factor_N)


def jitter_by_subsets(x_NCHW: Tensor, jitter_N: Tensor, turn_N4: Tensor, factor_N4: Tensor) -> Tensor:
    """What ``jitter_by_masks`` does, with each change computed for the samples alone whose turn it is: for the CPU."""
    x_NCHW = x_NCHW.clone()
    changes = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
    for slot in range(4):
        for column, change in enumerate(changes):
            row_R = ((turn_N4[:, column] == slot) & jitter_N).nonzero()[:, 0]
            if row_R.numel():
                changed = change(x_NCHW.index_select(0, row_R), factor_N4[:, column].index_select(0, row_R))
                x_NCHW.index_copy_(0, row_R, changed)
    return x_NCHW


def _spread(value_N: Tensor) -> Tensor:
    """One value an image, beside the pixels."""
    return value_N[:, None, None, None]

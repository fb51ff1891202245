"""Resized crops and blurs of a whole batch, where every sample has its own crop and its own blur.

Both are linear and separable: a view is R X C' for each channel X of an image, where R mixes rows and C columns. So a
batch is two batched matrix products, whatever its samples' parameters: no loop over the samples, one shape, and a
flip costs nothing, as it only reverses the order of C's rows.

The products are made in float32 also under autocast. Where TF32 is switched on for float32 products, a GPU keeps 10
bits of their inputs: faster, and a pixel moves by a fraction of a grey level of 255.

Legend:  N samples, C channels, H and W height and width of an image, S of a view (or of any output).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as functional
from torch import Tensor

from siammm.core.device import widest_float

# On the CPU, images above this many pixels are resized one after another by torch's kernel, which skips the zeros that
# make up most of a large interpolation matrix. Chosen by the image alone: a sample's view must not hang on its batch.
_LARGEST_BY_MATRICES = 64 * 64


def resized_crop(
    x_NCHW: Tensor, top_N: Tensor, left_N: Tensor, height_N: Tensor, width_N: Tensor, flip_N: Tensor, size: int
) -> Tensor:
    """Cut a box out of each image, resize it to ``size`` x ``size`` pixels, and mirror it where told.

    Bilinear with antialiasing, as torch's ``interpolate`` does on the box alone: pixels beside the box have no say.
    """
    if is_plain_cpu(x_NCHW) and max(x_NCHW.shape[2] * x_NCHW.shape[3], size * size) > _LARGEST_BY_MATRICES:
        return _resized_crop_one_by_one(x_NCHW, top_N, left_N, height_N, width_N, flip_N, size)
    rows_NSH = interpolation_matrices(top_N, height_N, x_NCHW.shape[2], size, x_NCHW.dtype)
    columns_NSW = interpolation_matrices(left_N, width_N, x_NCHW.shape[3], size, x_NCHW.dtype, flip_N)
    return mixed(x_NCHW, rows_NSH, columns_NSW)


def interpolation_matrices(
    start_N: Tensor, length_N: Tensor, n_pixels: int, size: int, dtype: torch.dtype, reverse_N: Tensor | None = None
) -> Tensor:
    """The N x size x n_pixels matrices that resize pixels start to start + length of a line to ``size`` pixels.

    Bilinear with antialiasing: a triangle around the place of each output pixel, as wide as an output pixel where the
    line shrinks and as an input pixel where it grows, cut at the ends of the stretch and normalised.
    """
    pixel_NS = torch.arange(size, device=start_N.device, dtype=dtype)[None, :]
    if reverse_N is not None:
        pixel_NS = torch.where(reverse_N[:, None], size - 1 - pixel_NS, pixel_NS)
    # A GPU divides float32 by a number through its reciprocal; the last bit that this costs would move the pixels at
    # the far end of a large image.
    scale_N1 = (length_N[:, None].to(widest_float(start_N.device)) / size).to(dtype)
    place_NS = (pixel_NS + 0.5) * scale_N1
    offset_N1P = torch.arange(n_pixels, device=start_N.device)[None, None, :] - start_N[:, None, None]
    inside_N1P = (offset_N1P >= 0) & (offset_N1P < length_N[:, None, None])
    # A pixel outside is moved so far away that no triangle reaches it; cheaper than masking the matrices.
    centre_N1P = torch.where(inside_N1P, offset_N1P.to(dtype) + 0.5, 1e6)
    distance_NSP = (centre_N1P - place_NS[:, :, None]).abs_()
    weight_NSP = distance_NSP.mul_(scale_N1.clamp_min(1.0).reciprocal()[:, :, None]).neg_().add_(1.0).clamp_min_(0.0)
    return weight_NSP.div_(weight_NSP.sum(dim=2, keepdim=True))


def _resized_crop_one_by_one(
    x_NCHW: Tensor, top_N: Tensor, left_N: Tensor, height_N: Tensor, width_N: Tensor, flip_N: Tensor, size: int
) -> Tensor:
    view_NCSS = x_NCHW.new_empty(*x_NCHW.shape[:2], size, size)
    boxes = torch.stack([top_N, left_N, height_N, width_N, flip_N.long()], dim=1).tolist()
    for x_CHW, view_CSS, (top, left, height, width, flip) in zip(x_NCHW, view_NCSS, boxes, strict=True):
        resized_CSS = resized(x_CHW[None, :, top : top + height, left : left + width], (size, size))[0]
        view_CSS.copy_(resized_CSS.flip(-1) if flip else resized_CSS)
    return view_NCSS


def resized(x_NCHW: Tensor, shape: tuple[int, int]) -> Tensor:
    """All images resized to one height and width, bilinear with antialiasing; uint8 stays uint8, rounded."""
    if x_NCHW.shape[2:] == shape:
        return x_NCHW
    return functional.interpolate(x_NCHW, size=shape, mode="bilinear", antialias=True)


def turned(x_NCHW: Tensor, rotation_N: Tensor, shear_N: Tensor) -> Tensor:
    """Turn each image clockwise and slant it along its rows, by degrees of its own, about its centre, over black.

    Bilinear; equal to torchvision's ``affine`` with these angles.
    """
    height, width = x_NCHW.shape[2:]
    turn_N, slant_N = (angle.to(x_NCHW.dtype) * (math.pi / 180) for angle in (rotation_N, shear_N))
    cos_N, sin_N, tan_N = turn_N.cos(), turn_N.sin(), slant_N.tan()
    # Where a pixel of the result comes from: the inverse of turning after slanting.
    row_x_N2 = torch.stack([cos_N - sin_N * tan_N, cos_N * tan_N + sin_N], dim=1)
    row_y_N2 = torch.stack([-sin_N, cos_N], dim=1)
    y_H = torch.arange(height, device=x_NCHW.device, dtype=x_NCHW.dtype) - (height - 1) / 2
    x_W = torch.arange(width, device=x_NCHW.device, dtype=x_NCHW.dtype) - (width - 1) / 2
    place_HW2 = torch.stack(torch.broadcast_tensors(x_W[None, :], y_H[:, None]), dim=2)
    from_x_NHW = (place_HW2 * row_x_N2[:, None, None]).sum(dim=3) / (width / 2)
    from_y_NHW = (place_HW2 * row_y_N2[:, None, None]).sum(dim=3) / (height / 2)
    grid_NHW2 = torch.stack([from_x_NHW, from_y_NHW], dim=3)
    with torch.autocast(x_NCHW.device.type, enabled=False):
        return functional.grid_sample(x_NCHW, grid_NHW2, mode="bilinear", padding_mode="zeros", align_corners=False)


def gaussian_blur(x_NCHW: Tensor, sigma_N: Tensor, kernel: int) -> Tensor:
    """Blur each image by a Gaussian of its own deviation in pixels, cut to ``kernel`` pixels, mirrored at the edges.

    Deviations are above 0. The mirror does not repeat the edge pixel (torch's "reflect").
    """
    rows_NHH = blur_matrices(sigma_N, x_NCHW.shape[2], kernel, x_NCHW.dtype)
    square = x_NCHW.shape[2] == x_NCHW.shape[3]
    columns_NWW = rows_NHH if square else blur_matrices(sigma_N, x_NCHW.shape[3], kernel, x_NCHW.dtype)
    return mixed(x_NCHW, rows_NHH, columns_NWW)


def blur_matrices(sigma_N: Tensor, n_pixels: int, kernel: int, dtype: torch.dtype) -> Tensor:
    """The N x n_pixels x n_pixels matrices that blur a line of pixels; ``kernel`` is odd and below 2 n_pixels."""
    pixel_P = torch.arange(n_pixels, device=sigma_N.device, dtype=dtype)
    to_P1, from_1P = pixel_P[:, None], pixel_P[None, :]
    last = n_pixels - 1
    precision_N11 = (sigma_N.to(dtype) * sigma_N.to(dtype)).mul_(2.0).reciprocal_()[:, None, None]

    def weights(distance_PP: Tensor, counts_PP: Tensor) -> Tensor:
        counted_PP = counts_PP & (distance_PP.abs() <= kernel // 2)
        return (-distance_PP.square() * precision_N11).exp_().mul_(counted_PP)

    # A pixel counts as itself, and as its image in the mirror at either end; those on the mirror have no other image.
    weight_NPP = weights(to_P1 - from_1P, torch.ones_like(from_1P, dtype=torch.bool))
    weight_NPP = weight_NPP + weights(to_P1 + from_1P, from_1P > 0)
    weight_NPP = weight_NPP + weights(2 * last - to_P1 - from_1P, from_1P < last)
    return weight_NPP.div_(weight_NPP.sum(dim=2, keepdim=True))


def mixed(x_NCHW: Tensor, rows_NSH: Tensor, columns_NTW: Tensor) -> Tensor:
    """R X C' of every channel: the rows of an image mixed by one matrix of its own and its columns by another."""
    n, channels, height, width = x_NCHW.shape
    with torch.autocast(x_NCHW.device.type, enabled=False):
        y_NCHT = torch.bmm(x_NCHW.reshape(n, channels * height, width), columns_NTW.transpose(1, 2))
        return torch.matmul(rows_NSH[:, None], y_NCHT.view(n, channels, height, columns_NTW.shape[1]))


def is_plain_cpu(x: Tensor) -> bool:
    """Whether Python may look at numbers and branch on them: on the CPU, and not while a graph is being compiled."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()

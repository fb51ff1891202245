"""Kernel regression of the classes on features, with every prediction made as if its own sample had not been there.

Least squares on a Gaussian kernel sees curved borders between classes where a linear classifier sees straight ones,
and it needs no folds: leaving a sample out of a least-squares fit changes its own prediction by a factor that the fit
itself knows, so one fit gives all N predictions with the sample left out. The kernel is that of a thousand of the
samples (Nystroem), which keeps the work linear in N.

    residual without sample i = residual of i / (1 - leverage of i)

Legend:  N samples, D dimensions, C classes, M landmarks, R rows of a chunk, P penalties;  k kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from siammm.mixture.search.neighbours import score_chunk_rows

PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""Candidates for the ridge, as shares of N; the one with the least error on samples left out is taken."""

_LANDMARKS = 1000
_ROWS_FOR_WIDTH = 2000
_ROWS_FOR_PENALTY = 5000
# Of the sum of a matrix's eigenvalues, added to each of them: below this there are rounding errors.
_ROUNDING = 1e-10


def left_out_scores(
    features_ND: Tensor,
    labels_N: Tensor,
    n_classes: int,
    *,
    weight_N: Tensor | None = None,
    penalties: tuple[float, ...] = PENALTIES,
    seed: int = 0,
) -> Tensor:
    """The regression's score of every class for every sample, as if the sample had not been there.

    Shapes: features (N, D), labels (N,) from 0; returns (N, C) float32, about 0 to 1 and not normalised. ``weight_N``:
    how much each sample's label counts. The kernel's width is the median distance; landmarks are drawn by ``seed``.
    """
    device = features_ND.device
    # Kernels are nearly singular, so all is in double precision, on the CPU where the device has none.
    exact = torch.device("cpu") if device.type == "mps" else device
    x_ND = features_ND.detach().float().to(exact)
    x_ND = (x_ND - x_ND.mean(dim=0)) / x_ND.std(dim=0).clamp_min(1e-6)
    n = x_ND.shape[0]
    weight_N = (torch.ones(n) if weight_N is None else weight_N).to(exact, torch.float64)
    labels_N = labels_N.to(exact)
    share_C = torch.bincount(labels_N, weights=weight_N, minlength=n_classes) / weight_N.sum()
    order_N = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(exact)
    landmark_MD = x_ND[order_N[:_LANDMARKS]].double()
    m = landmark_MD.shape[0]
    width = torch.cdist(x_ND[order_N[-_ROWS_FOR_WIDTH:]].double(), landmark_MD).square_().median().clamp_min(1e-12)

    def kernel(rows: Tensor | slice) -> Tensor:
        return (-torch.cdist(x_ND[rows].double(), landmark_MD).square_() / width).exp_()

    def targets(rows: Tensor | slice) -> Tensor:
        """Which class a sample has, less what a random one would have."""
        return torch.nn.functional.one_hot(labels_N[rows], n_classes) - share_C

    rows = max(256, score_chunk_rows(exact, torch.float64, m))
    gram_MM = torch.zeros(m, m, dtype=torch.float64, device=exact)
    target_MC = torch.zeros(m, n_classes, dtype=torch.float64, device=exact)
    for start in range(0, n, rows):
        piece = slice(start, start + rows)
        k_RM = kernel(piece)
        weighted_MR = (weight_N[piece, None] * k_RM).T
        gram_MM += weighted_MR @ k_RM
        target_MC += weighted_MR @ targets(piece)
    between_MM = kernel(order_N[:_LANDMARKS])
    total = float(weight_N.sum())
    roots_PMM: list[Tensor] = []
    for penalty in penalties:
        matrix_MM = gram_MM + penalty * total * between_MM
        matrix_MM.diagonal().add_(_ROUNDING * float(matrix_MM.diagonal().sum()))
        roots_PMM.append(torch.linalg.cholesky(matrix_MM))
    solution_PMC = [torch.cholesky_solve(target_MC, root_MM) for root_MM in roots_PMM]

    def residuals(rows: Tensor | slice, k_RM: Tensor, y_RC: Tensor, p: int) -> Tensor:
        """What is left of the targets when each sample is predicted by the others."""
        half_MR = torch.linalg.solve_triangular(roots_PMM[p], k_RM.T, upper=False)
        leverage_R = weight_N[rows] * half_MR.square().sum(dim=0)
        return (y_RC - k_RM @ solution_PMC[p]) / (1 - leverage_R).clamp_min(1e-3)[:, None]

    error_P = torch.zeros(len(penalties), dtype=torch.float64, device=exact)
    for piece_R in order_N[-_ROWS_FOR_PENALTY:].split(rows):
        k_RM, y_RC = kernel(piece_R), targets(piece_R)
        for p in range(len(penalties)):
            residual_RC = residuals(piece_R, k_RM, y_RC, p)
            error_P[p] += (weight_N[piece_R, None] * residual_RC.square()).sum()
    best = int(error_P.argmin())
    score_NC = torch.empty(n, n_classes, device=exact)
    for start in range(0, n, rows):
        piece = slice(start, start + rows)
        k_RM, y_RC = kernel(piece), targets(piece)
        score_NC[piece] = (y_RC - residuals(piece, k_RM, y_RC, best) + share_C).float()
    return score_NC.to(device)

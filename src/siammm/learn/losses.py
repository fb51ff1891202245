"""The losses of the paper as functions of tensors, for our loop or anybody's; public as ``siammm.losses``.

None keeps state or reads a value on the device, so all can be compiled or captured in a CUDA graph (except
``relative_concentrations``, which runs once per epoch). Embeddings are scaled to unit length inside. 16-bit ones are
converted to float32 and autocast is switched off, because a concentration multiplies the rounding error of a cosine;
call ``backward`` outside the autocast region. The mixture's parameters never carry a gradient. Every loss is the mean
over its batch; under data parallelism, over the rank's part of it.

Legend, after the paper:

    v       embedding of a view by the encoder and the predictor; v_m the momentum encoder's
    mu      mean direction of a component, unit length    kappa   its concentration
    pi      weight of a component for a sample            alpha   size of a component     tau     temperature
    N, D    in a shape: samples of the batch, dimensions  K, H    components, the nearest of them to a sample
    M       negatives
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from siammm.core.checks import check_positive
from siammm.core.errors import InputError
from siammm.learn.loss_inputs import check_numbers, check_pair, check_shape, unit, wide, without_autocast

# Keys of all ranks from the keys of this one, and the number of the row at which this rank's own begin.
Gather = Callable[[Tensor], tuple[Tensor, int]]


@without_autocast
def instance_distance(v_1: Tensor, v_2: Tensor) -> Tensor:
    """Distance of one view's predictions from the other view's embeddings, which stay fixed.

    Eq. 1. Shapes: v_1 and v_2 (N, D); returns a scalar between 0 and 2.

    The paper leaves the distance D open. This is the cosine distance, 1 - cos, half the squared distance of the unit
    vectors: what SimSiam and BYOL use, up to a factor and a constant.
    """
    check_pair("v_1", v_1, "v_2", v_2)
    v_1 = unit(v_1)
    return (1 - (v_1 * unit(v_2.detach()).to(v_1.dtype)).sum(dim=1)).mean()


def instance_loss(v_1: Tensor, v_2: Tensor, v_1m: Tensor, v_2m: Tensor) -> Tensor:
    """Each view's predictions against the momentum encoder's embeddings of the other view.

    Eq. 12. Shapes: all (N, D); returns a scalar between 0 and 4. No gradient reaches v_1m and v_2m.
    """
    return instance_distance(v_1, v_2m) + instance_distance(v_2, v_1m)


@without_autocast
def contrastive_instance_loss(
    v_1: Tensor,
    v_2: Tensor,
    v_1m: Tensor,
    v_2m: Tensor,
    temperature: float | Tensor = 1.0,
    all_gather: Gather | None = None,
) -> Tensor:
    """Pick each sample's other view out of the whole batch: MoCo v3's loss, an alternative to Eq. 12.

    For each direction 2 tau times the cross entropy of the cosines over tau; the factor keeps the size of the gradient
    when the temperature changes. Shapes: all (N, D); returns a scalar. No gradient reaches v_1m and v_2m. A temperature
    that changes from step to step may be a tensor without dimensions, whose value is not looked at.

    ``all_gather`` makes the negatives those of all ranks: it gets this rank's keys (N, D) and returns everybody's, one
    rank's after another, with the number of the row at which this rank's begin. It is called for v_2m, then for v_1m.

    Not in the paper, whose losses need no negatives; MoCo v3 is where its views and heads come from.
    """
    if not isinstance(temperature, Tensor):
        check_positive("temperature", temperature)
    elif temperature.ndim:
        raise InputError(f"temperature has the shape {tuple(temperature.shape)}, but it is one number; give a scalar.")
    return _contrast(v_1, v_2m, temperature, all_gather) + _contrast(v_2, v_1m, temperature, all_gather)


def _contrast(v_ND: Tensor, key_ND: Tensor, temperature: float | Tensor, all_gather: Gather | None) -> Tensor:
    check_pair("The predictions", v_ND, "the keys", key_ND)
    v_ND, n = unit(v_ND), v_ND.shape[0]
    key_MD, first = unit(key_ND.detach()).to(v_ND.dtype), 0
    if all_gather is not None:
        key_MD, first = all_gather(key_MD)
    if first < 0 or first + n > key_MD.shape[0]:
        raise InputError(
            f"all_gather returned {key_MD.shape[0]} keys, but this rank's {n} begin at row {first}; "
            "it must return the keys of all ranks and the row at which this rank's begin."
        )
    positive_N = torch.arange(first, first + n, device=v_ND.device)
    cosine_NM = v_ND @ key_MD.detach().T
    return 2 * temperature * functional.cross_entropy(cosine_NM / temperature, positive_N)


@without_autocast
def assignment_weights(similarity_NH: Tensor, temperature: float, log_size_NH: Tensor | None = None) -> Tensor:
    """How a sample is shared among its H nearest components.

    Eq. 10: alpha exp(mu v / tau), scaled to sum to 1. Shapes: similarity_NH the cosines mu v, log_size_NH the logarithm
    of alpha, which is 1 if left out, as in the paper's experiments; returns (N, H) with rows that sum to 1. A size of 0
    (log -inf) gives a weight of 0; a row of nothing but these gives zeros, hence no loss in Eq. 9.
    """
    check_positive("temperature", temperature)
    check_shape("similarity_NH", similarity_NH, (None, None))
    logit_NH = wide(similarity_NH) / temperature
    if log_size_NH is None:
        return logit_NH.softmax(dim=1)
    check_shape("log_size_NH", log_size_NH, tuple(similarity_NH.shape))
    log_size_NH = log_size_NH.to(logit_NH.dtype)
    none_N1 = (log_size_NH == -math.inf).all(dim=1, keepdim=True)
    weight_NH = (logit_NH + log_size_NH.masked_fill(none_N1, 0.0)).softmax(dim=1)
    return weight_NH.masked_fill(none_N1, 0.0)


@without_autocast
def soft_assignment_loss(
    v_ND: Tensor, mu_NHD: Tensor, kappa_NH: Tensor, weight_NH: Tensor, log_normaliser_NH: Tensor | None = None
) -> Tensor:
    """Negative log likelihood of the samples under the few components they are assigned to; no negatives.

    Eq. 9, -log sum_k pi_k exp(kappa_k mu_k v); with H = 1 and weights of 1 the hard assignment of Eq. 8, -kappa mu v.
    Shapes: as the names say, mu_NHD of unit length, weight_NH at least 0; returns a scalar, which may be negative. Only
    v_ND carries a gradient: mu, kappa and pi are fixed estimates.

    A component of weight 0 takes no part; a sample whose weights are all 0 belongs nowhere yet, adds 0 to the sum and
    gets no gradient. The paper leaves the density's normaliser out: ``log_normaliser_NH``, log c_d(kappa) of Eq. 4,
    puts it back. It cannot change a gradient at H = 1; above, it favours the concentrated components.
    """
    n, d = check_shape("v_ND", v_ND, (None, None))
    h = check_shape("weight_NH", weight_NH, (n, None))[1]
    check_shape("kappa_NH", kappa_NH, (n, h))
    check_shape("mu_NHD", mu_NHD, (n, h, d))
    v_ND = unit(v_ND)
    mu_NHD, kappa_NH, weight_NH = (fixed.detach().to(v_ND.dtype) for fixed in (mu_NHD, kappa_NH, weight_NH))
    assigned_N = (weight_NH != 0).any(dim=1)
    # log 0 is -inf, which adds nothing; but a row of these alone has no derivative, so it gets a value to be discarded.
    log_weight_NH = weight_NH.log().masked_fill(~assigned_N[:, None], 0.0)
    if log_normaliser_NH is not None:
        check_shape("log_normaliser_NH", log_normaliser_NH, (n, h))
        log_weight_NH = log_weight_NH + log_normaliser_NH.detach().to(v_ND.dtype)
    # A product and a sum in place of a matrix product: as fast for this shape, and TF32 does not round it.
    cosine_NH = (mu_NHD * v_ND[:, None]).sum(dim=2)
    loss_N = -(log_weight_NH + kappa_NH * cosine_NH).logsumexp(dim=1)
    return torch.where(assigned_N, loss_N, 0.0).mean()


@without_autocast
def negative_centroids_loss(
    v_ND: Tensor, mu_KD: Tensor, kappa_K: Tensor, positive_N: Tensor, negative_index: Tensor | None = None
) -> Tensor:
    """Tell a sample's own component from the others, which push it away.

    Eq. 14. Shapes: as the names say; positive_N int64, the number of each sample's component; returns a scalar of at
    least 0. Only v_ND carries a gradient.

    ``negative_index`` (M,) int64 limits the negatives to these components, as the paper does (it draws 16,000); one
    that is a sample's own is left out for that sample, and one drawn twice counts twice. Without it, all other
    components are negatives. The scores are N x K or N x M, 1.6 GB for a batch of 4,096 against 100,000, and three
    times that with the gradient.
    """
    n, d = check_shape("v_ND", v_ND, (None, None))
    k = check_shape("mu_KD", mu_KD, (None, d))[0]
    check_shape("kappa_K", kappa_K, (k,))
    check_numbers("positive_N", positive_N, (n,))
    v_ND = unit(v_ND)
    scaled_KD = mu_KD.detach().to(v_ND.dtype) * kappa_K.detach().to(v_ND.dtype)[:, None]
    if negative_index is None:
        return functional.cross_entropy(v_ND @ scaled_KD.T, positive_N)
    check_numbers("negative_index", negative_index, (None,))
    positive_score_N = (v_ND * scaled_KD[positive_N]).sum(dim=1)
    own_NM = positive_N[:, None] == negative_index
    return _positive_against_rest(positive_score_N, v_ND @ scaled_KD[negative_index].T, own_NM)


@without_autocast
def group_loss(v_ND: Tensor, mu_GD: Tensor, group_N: Tensor, weight_N: Tensor, concentration: float = 10.0) -> Tensor:
    """Tell the group of each sample that is sure of its own from the other groups.

    Not in the paper: Eq. 14 at the level of groups, with one concentration for all, by which the loss is divided so
    that it weighs as much as Eq. 9. Shapes: v (N, D), mu (G, D), group and weight (N,); a weight of 0 leaves a sample
    out, and the mean is over the others. Returns a scalar of at least 0. Only v carries a gradient.
    """
    n, d = check_shape("v_ND", v_ND, (None, None))
    check_shape("mu_GD", mu_GD, (None, d))
    check_shape("weight_N", weight_N, (n,))
    check_numbers("group_N", group_N, (n,))
    check_positive("concentration", concentration)
    v_ND = unit(v_ND)
    loss_N = functional.cross_entropy(concentration * v_ND @ mu_GD.detach().to(v_ND.dtype).T, group_N, reduction="none")
    weight_N = weight_N.detach().to(v_ND.dtype)
    return (loss_N * weight_N).sum() / (concentration * weight_N.sum().clamp_min(1.0))


@without_autocast
def negative_samples_loss(
    v_ND: Tensor, cluster_N: Tensor, mu_ND: Tensor, kappa_N: Tensor, negatives_MD: Tensor, negative_cluster_M: Tensor
) -> Tensor:
    """Tell a sample from embeddings of other clusters, by their likeness to the sample's own component.

    Eq. 15. Shapes: as the names say; mu_ND and kappa_N are those of each sample's component, cluster_N int64 its
    number; negative_cluster_M int64 the clusters of the negatives. Returns a scalar of at least 0.

    Negatives are all of negatives_MD that lie outside the sample's cluster; a sample with none adds 0 and gets no
    gradient. mu and kappa carry no gradient; the negatives do if they have one, which the paper leaves open: give
    momentum embeddings or a bank to hold them fixed, the batch's own predictions to push them away as well.
    """
    n, d = check_shape("v_ND", v_ND, (None, None))
    check_numbers("cluster_N", cluster_N, (n,))
    check_shape("mu_ND", mu_ND, (n, d))
    check_shape("kappa_N", kappa_N, (n,))
    m = check_shape("negatives_MD", negatives_MD, (None, d), least=0)[0]
    check_numbers("negative_cluster_M", negative_cluster_M, (m,))
    v_ND = unit(v_ND)
    mu_ND, kappa_N = mu_ND.detach().to(v_ND.dtype), kappa_N.detach().to(v_ND.dtype)
    scaled_ND = mu_ND * kappa_N[:, None]
    negative_NM = scaled_ND @ unit(negatives_MD).to(v_ND.dtype).T
    same_NM = cluster_N[:, None] == negative_cluster_M
    return _positive_against_rest((scaled_ND * v_ND).sum(dim=1), negative_NM, same_NM)


def _positive_against_rest(positive_N: Tensor, negative_NM: Tensor, left_out_NM: Tensor) -> Tensor:
    """Mean of -log exp(positive) / (exp(positive) + sum of exp(negative)), without the pairs that are left out."""
    score_NM = torch.cat([positive_N[:, None], negative_NM.masked_fill(left_out_NM, -math.inf)], dim=1)
    return (score_NM.logsumexp(dim=1) - positive_N).mean()


def relative_concentrations(
    kappa_K: Tensor, weight_K: Tensor | None = None, scale: float = 1.0, quantiles: tuple[float, float] = (0.1, 0.9)
) -> Tensor:
    """Concentrations as the loss uses them: outliers clipped, the mean brought to ``scale``.

    For Eq. 9, 14 and 15. Eq. 7 gives hundreds at d = 256, against an instance loss of about 1, so that Eq. 13 taken
    literally is the cluster loss alone; which component is tighter than which is what the paper's ablation is about.
    Shapes: kappa_K and weight_K (K,); returns (K,) in kappa's type and on its device.

    Values beyond the two quantiles of the components are set to these. ``weight_K``, the components' shares of the
    samples, makes the mean that over samples; a component of weight 0 counts neither for the mean nor for the
    quantiles. Without it all components count alike. If all are 0, all become ``scale``. Meant for once an epoch: it
    looks at the values, on the CPU.
    """
    check_positive("scale", scale)
    low, high = quantiles
    if not 0 <= low <= high <= 1:
        raise InputError(f"quantiles is {quantiles!r}, but it must be two numbers between 0 and 1, the lower first.")
    k = check_shape("kappa_K", kappa_K, (None,))[0]
    kappa = kappa_K.detach().to("cpu", torch.float64)
    weight = torch.ones_like(kappa)
    if weight_K is not None:
        check_shape("weight_K", weight_K, (k,))
        weight = weight_K.detach().to("cpu", torch.float64)
        if not bool((weight.isfinite() & (weight >= 0)).all()) or not float(weight.sum()) > 0:
            raise InputError(
                f"weight_K goes from {float(weight.min())} to {float(weight.max())}, but it must be finite, at least 0 "
                "and above 0 somewhere; give the components' shares of the samples."
            )
    counted = weight > 0
    bad = int((counted & ~(kappa.isfinite() & (kappa >= 0))).sum())
    if bad:
        raise InputError(
            f"{bad} of the {k} concentrations are not finite or are below 0; cap them, as VonMisesFisherMixture does."
        )
    bounds = torch.quantile(kappa[counted], torch.tensor([low, high], dtype=torch.float64))
    clipped = kappa.nan_to_num(nan=0.0).clamp(bounds[0], bounds[1])
    mean = (clipped * weight).sum() / weight.sum()
    relative = clipped * (scale / mean) if float(mean) > 0 else torch.full_like(clipped, scale)
    return relative.to(kappa_K)


def final_loss(cluster: Tensor, instance: Tensor, cluster_weight: float | Tensor = 1.0) -> Tensor:
    """The whole objective: cluster loss plus instance loss.

    Eq. 13, which has ``cluster_weight`` = 1. The weight may be a scalar tensor, so that a captured CUDA graph can ramp
    it up; 0 switches the clusters off, as before the first clustering.
    """
    return instance + cluster_weight * cluster

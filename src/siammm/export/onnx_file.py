"""The whole model as one ONNX file: an image in; embedding, features, cluster, group and outlier score out.

The image is uint8, N x side x side x 3, red, green and blue, as Pillow and NumPy have it. Everything after resizing it
to ``side`` is inside: cutting out the centre, normalising, the network, the mixture with the scale of its outliers, and
the borders of the groups, if groups were found.

Legend:  N images, S pixels of the side that the network sees, D dimensions of the embedding, K clusters, G groups,
         H neighbours, P points of the outlier scale.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from siammm.core.errors import InputError
from siammm.core.version import __version__
from siammm.data.augment import clean_side
from siammm.data.view_settings import ViewSettings
from siammm.export.outlier_scale import OutlierScale
from siammm.learn.networks import Encoder
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.mixture.group_rule import Groups
from siammm.runs.run import Run

OPSET = 18
PACKAGES = ("onnx", "onnxscript")
INPUT = "image"
OUTPUTS = ("embedding", "features", "cluster", "probability", "outlier_score", "group", "group_probability")
"""All that a file may compute, in this order."""
# How far the file may be from the model on images of noise, which are unlike any of the run's: rounding moves what is
# computed from cosines by more than the cosines.
_TOLERANCES = {
    "embedding": 1e-4,
    "features": 1e-4,
    "probability": 1e-3,
    "outlier_score": 1e-2,
    "group_probability": 1e-2,
}


def missing_packages() -> list[str]:
    """The packages that an export to ONNX needs and that are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def require_packages() -> None:
    """Refuse an export to ONNX without its packages."""
    missing = missing_packages()
    if missing:
        names = " and ".join(missing)
        raise InputError(f"An export to ONNX needs {names}, not installed here; pip install {' '.join(missing)}.")


# -- the graph ---------------------------------------------------------------------------------------------------------


class InferenceModel(nn.Module):
    """What the file computes."""

    def __init__(
        self, encoder: Encoder, view: ViewSettings, mixture: VonMisesFisherMixture | None, scale: OutlierScale | None
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.size, self.side = view.size, clean_side(view.size)
        self.register_buffer("mean", torch.tensor(view.mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(view.std).view(1, 3, 1, 1))
        self.clusters = None if mixture is None else _Clusters(mixture)
        self.scale = None if scale is None else _Scale(scale)
        groups = None if mixture is None else mixture.groups_
        self.groups = None if groups is None or not groups.is_found else _Groups(groups)

    mean: Tensor
    std: Tensor

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of what ``forward`` returns."""
        left_out = {
            *(("cluster", "probability", "outlier_score") if self.clusters is None else ()),
            *(("outlier_score",) if self.scale is None else ()),
            *(("group", "group_probability") if self.groups is None else ()),
        }
        return tuple(name for name in OUTPUTS if name not in left_out)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """See ``outputs``; embeddings are of unit length, features as the backbone leaves them."""
        margin = round((self.side - self.size) / 2)
        x = image[:, margin : margin + self.size, margin : margin + self.size].permute(0, 3, 1, 2)
        x = (x.to(torch.float32) / 255.0 - self.mean) / self.std
        features = self.encoder.backbone(x)
        embedding = functional.normalize(self.encoder.projector(features), dim=1)
        found: list[Tensor] = [embedding, features]
        if self.clusters is not None:
            cluster, probability, log_density = self.clusters(embedding)
            found += [cluster, probability, *([] if self.scale is None else [self.scale(log_density)])]
        if self.groups is not None:
            found += self.groups(embedding)
        return tuple(found)


class _Clusters(nn.Module):
    """The mixture's assignment (Eq. 8 and 10, or the posterior) and log density (Eq. 3), in float32.

    As ``em.assignments`` and ``em.log_likelihoods`` have it, in operations that ONNX has.
    """

    def __init__(self, mixture: VonMisesFisherMixture) -> None:
        super().__init__()
        components: Any = mixture._components(torch.device("cpu"))
        assignment = mixture._assignment()
        self.by_posterior = assignment.rule == "posterior"
        self.n_neighbours = min(assignment.n_neighbours, components.weight_K.shape[0])
        self.temperature = assignment.temperature
        self.size_weighting = assignment.size_weighting
        mu_KD, kappa_K = components.mu_KD, components.kappa_K
        # What log_joint makes of a cosine of 1.
        cosine_K1, index_K1 = torch.ones_like(kappa_K)[:, None], torch.arange(len(kappa_K))[:, None]
        self.register_buffer("mu_DK", mu_KD.T.contiguous().float())
        self.register_buffer("kappa_K", kappa_K.float())
        self.register_buffer("offset_K", components.log_joint_of(mu_KD, cosine_K1, index_K1)[:, 0].float())
        self.register_buffer("log_weight_K", components.weight_K.clamp_min(1e-300).log().float())

    mu_DK: Tensor
    kappa_K: Tensor
    offset_K: Tensor
    log_weight_K: Tensor

    def forward(self, embedding_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cluster, probability and log density of each embedding."""
        cosine_NK = embedding_ND @ self.mu_DK
        log_joint_NK = (cosine_NK - 1) * self.kappa_K + self.offset_K
        log_density_N = log_joint_NK.logsumexp(dim=1)
        if self.by_posterior:
            share_N, cluster_N = log_joint_NK.softmax(dim=1).max(dim=1)
            return cluster_N, share_N, log_density_N
        score_NH, index_NH = cosine_NK.topk(self.n_neighbours, dim=1)
        logit_NH = score_NH / self.temperature
        if self.size_weighting:
            logit_NH = logit_NH + self.log_weight_K[index_NH]
        share_N1, place_N1 = logit_NH.softmax(dim=1).max(dim=1, keepdim=True)
        return index_NH.gather(1, place_N1)[:, 0], share_N1[:, 0], log_density_N


class _Groups(nn.Module):
    """The linear scores of the groups, as ``Groups.predict_proba`` has them, in float32."""

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        assert groups.unit, "embeddings here are of unit length"
        weight_GD, offset_G = (torch.from_numpy(np.asarray(part)) for part in (groups.weight_GD, groups.offset_G))
        # What all scores have in common changes no probability, and would cost digits.
        self.register_buffer("weight_DG", (weight_GD - weight_GD.mean(dim=0)).T.contiguous().float())
        self.register_buffer("offset_G", (offset_G - offset_G.mean()).float())

    weight_DG: Tensor
    offset_G: Tensor

    def forward(self, embedding_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Group of each embedding, and its probability."""
        share_N, group_N = (embedding_ND @ self.weight_DG + self.offset_G).softmax(dim=1).max(dim=1)
        return group_N, share_N


class _Scale(nn.Module):
    """``OutlierScale`` by bisection: ONNX has no search in a sorted list."""

    def __init__(self, scale: OutlierScale) -> None:
        super().__init__()
        n = len(scale.density_P)
        self.last = n - 1
        self.steps = [2**power for power in reversed(range(n.bit_length()))]
        # Padded so that every step finds something to compare with.
        padded = np.full(2 ** n.bit_length(), np.inf)
        padded[:n] = scale.density_P
        self.register_buffer("density_P", torch.from_numpy(padded).float())
        self.register_buffer("score_P", torch.from_numpy(scale.score_P).float())

    density_P: Tensor
    score_P: Tensor

    def forward(self, log_density_N: Tensor) -> Tensor:
        """The outlier score of each log density."""
        below_N = torch.zeros_like(log_density_N, dtype=torch.int64)
        for step in self.steps:
            below_N = torch.where(self.density_P[below_N + step - 1] <= log_density_N, below_N + step, below_N)
        low_N = (below_N - 1).clamp(0, self.last)
        high_N = below_N.clamp(0, self.last)
        width_N = (self.density_P[high_N] - self.density_P[low_N]).clamp_min(1e-30)
        part_N = ((log_density_N - self.density_P[low_N]) / width_N).clamp(0.0, 1.0)
        return self.score_P[low_N] + part_N * (self.score_P[high_N] - self.score_P[low_N])


# -- the file ----------------------------------------------------------------------------------------------------------


def inference_model(run: Run, log_density_N: np.ndarray | None) -> InferenceModel:
    """The model of a run on the CPU; ``log_density_N`` are those of the images that outliers are measured against."""
    encoder, mixture = deepcopy(run.embedding_encoder).cpu().float(), run.mixture if run.has_clusters else None
    scale = None if log_density_N is None else OutlierScale.of(log_density_N)
    return InferenceModel(encoder, run.view, mixture, scale).eval()


def write_onnx(path: Path, run: Run, log_density_N: np.ndarray | None) -> tuple[str, ...]:
    """Write the file, and return the names of its outputs.

    It is checked first, and compared with the model if ONNX Runtime is installed.
    """
    require_packages()
    import onnx

    model = inference_model(run, log_density_N)
    example = torch.zeros(2, model.side, model.side, 3, dtype=torch.uint8)
    with _quiet(), torch.no_grad():
        program: Any = torch.onnx.export(
            model,
            (example,),
            dynamo=True,
            input_names=[INPUT],
            output_names=list(model.outputs),
            dynamic_shapes={INPUT: {0: torch.export.Dim("batch")}},
            opset_version=OPSET,
            verbose=False,
        )
        proto = program.model_proto
    _strip(proto)
    onnx.helper.set_model_props(proto, _metadata(run, model, None if log_density_N is None else len(log_density_N)))
    onnx.checker.check_model(proto, full_check=True)
    content = proto.SerializeToString()
    _compare(content, model)
    path.write_bytes(content)
    return model.outputs


def _metadata(run: Run, model: InferenceModel, n_reference: int | None) -> dict[str, str]:
    """What the file says about itself; values are JSON where they are no plain text."""
    facts: dict[str, Any] = {
        "siammm_version": __version__,
        "model": "SiamMM",
        "backbone": run.config.network.backbone,
        "input": f"uint8, N x {model.side} x {model.side} x 3, red, green and blue from 0 to 255",
        "input_side": model.side,
        "image_size": model.size,
        "mean": list(run.view.mean),
        "std": list(run.view.std),
        "embedding_dim": run.network.encoder.embedding_dim,
        "n_features": run.network.encoder.num_features,
        "n_clusters": run.n_clusters if run.has_clusters else 0,
        **({"n_groups": run.groups.n_groups} if run.groups is not None and run.has_groups else {}),
        "opset": OPSET,
    }
    if n_reference is not None:
        facts["n_reference_images"] = n_reference
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}


def _strip(proto: Any) -> None:
    """Take out what the exporter notes about our source files, folders of this machine among it."""
    graph, functions = proto.graph, proto.functions
    parts = [graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer]
    for part in (*parts, *functions, *(node for function in functions for node in function.node)):
        del part.metadata_props[:]
    for node in graph.node:
        node.doc_string = ""


def _compare(content: bytes, model: InferenceModel) -> None:
    """Run the file on images of noise, one and three at once, and compare."""
    try:
        import onnxruntime
    except ImportError:
        return
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(0)
    for n in (1, 3):
        image = torch.randint(0, 256, (n, model.side, model.side, 3), generator=generator, dtype=torch.uint8)
        with torch.no_grad():
            ours = model(image)
        found = dict(zip(model.outputs, session.run(list(model.outputs), {INPUT: image.numpy()}), strict=True))
        # Clusters and groups are not compared: rounding decides between two that are equally near.
        for name, value in zip(model.outputs, ours, strict=True):
            limit = _TOLERANCES.get(name, np.inf) * max(1.0, float(value.abs().max()))
            if float(np.abs(found[name] - value.numpy()).max()) > limit:
                raise InputError(
                    f"The ONNX file gives another {name} than the model, so it was not kept; leave onnx out of "
                    "--formats, and tell the developers."
                )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's exporter: what it logs and warns about is for its developers, not about the file."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):
                warnings.filterwarnings("ignore", category=category, module=r"(torch|onnxscript|onnx_ir|copyreg)\b")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

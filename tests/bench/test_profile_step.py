"""Kernels are told by their names: those that torch, cuDNN, cuBLAS, Triton and we give them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from siammm.bench.workload import Workload
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS

CONV = "sm90_xmma_{}_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1_g1"


@pytest.fixture
def profile_step(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("profile_step")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (CONV.format("fprop"), "convolution, forward"),
        (CONV.format("dgrad"), "convolution, backward, data"),
        (CONV.format("wgrad"), "convolution, backward, weights"),
        ("cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_128x64>", "convolution, forward"),
        ("aten::convolution_backward", "convolution, backward"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix product"),
        ("triton_red_fused__native_batch_norm_legit_functional__to_copy_3", "BatchNorm"),
        ("_sums", "BatchNorm"),
        ("_gradient_totals", "BatchNorm"),
        ("triton_poi_fused__to_copy_convolution_2", "layout and copies"),
        ("void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16>", "layout and copies"),
        ("Memcpy DtoD (Device -> Device)", "layout and copies"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<>", "optimiser and momentum encoder"),
        ("triton_poi_fused_add_mul_where_0", "elementwise"),
        ("void at::native::index_elementwise_kernel<128, 4>", "gather and scatter"),
        ("void at::native::reduce_kernel<512, 1>", "reduction"),
    ],
)
def test_the_kind_of_a_kernel(profile_step: Any, name: str, kind: str) -> None:
    assert profile_step.kind_of(name) == kind


@pytest.mark.usefixtures("one_thread")
def test_every_phase_of_a_step_is_seen(profile_step: Any) -> None:
    settings = {"backbone": "conv-small", "image_size": 8, "augmentation": "32", "batch_size": 8, "merge": "none"}
    config = with_settings(PRESETS["cifar"], **settings, hidden_dim=16, embedding_dim=8, n_components=4)
    load = Workload(config, torch.device("cpu"), n_images=32)
    with profile_step.phases(load):
        profile = profile_step.profiled(lambda: load.advance(1, clustered=True), load.device)
    assert {name for _, _, name in profile_step.spans(profile)} == set(profile_step.PHASES) - {"rest"}

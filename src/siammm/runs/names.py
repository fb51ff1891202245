"""The files of an export. ``timm`` looks for the first two by name and at no others."""

from __future__ import annotations

WEIGHTS, CONFIG = "model.safetensors", "config.json"
NETWORKS, MIXTURE = "siammm.safetensors", "mixture.safetensors"
CARD = "README.md"
ONNX = "siammm.onnx"
EMBEDDINGS, CLUSTERS = "embeddings.parquet", "clusters.parquet"

ENCODER_NAMES = (WEIGHTS, CONFIG, NETWORKS, MIXTURE, CARD)
"""What ``save_pretrained`` writes and the hub is given."""
NAMES = frozenset({*ENCODER_NAMES, ONNX, EMBEDDINGS, CLUSTERS})
"""What an export consists of; a folder that holds anything else is not replaced."""

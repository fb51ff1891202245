"""Handing what a run found to other people's tools: timm, the Hugging Face hub, ONNX Runtime, readers of Parquet."""

"""The names of all files that a run and an export consist of. They stand here and nowhere else.

A run, as ``siammm train`` leaves it:

config.json           the settings, the fingerprint of the data, versions
inventory.parquet     size, time and digest of the files that the images are in
metrics.jsonl         one line per epoch
tensorboard/          the same, if tensorboard is installed
checkpoints/          what a stopped run is resumed from
set_aside.json        images that could not be read, with reasons
mixture.safetensors   the clusters and their groups
encoder.safetensors   the networks
assignments.parquet   the cluster and the group of every image
embeddings.npy        what was clustered: float16, of unit length, one row for each row of assignments.parquet
merges.json           the tree of merges, the node of each cluster in it, and the number of clusters after each epoch
names.json            the names that a person has given to groups, in ``siammm explore``
selections.json       the images that a person has selected and named there

.lock                 the process that is writing into the folder, while one is

A run, as ``siammm cluster`` leaves it:

summary.json          the settings, the images or the table, the encoder by its name, what was found, versions
mixture.safetensors   the clusters and their groups
assignments.parquet   the cluster and the group of every image or row
embeddings.npy        of images: what was clustered, as above
embeddings.parquet    of images: the same in float32, as the encoder left it, with names and labels

An export, as ``siammm export`` and ``SiamMM.save_pretrained`` leave it (timm looks for the first two by name):

model.safetensors, config.json          the backbone as timm reads it
siammm.safetensors                      all networks, with the settings that build them
mixture.safetensors                     the clusters and their groups
README.md                               the model card
siammm.onnx                             the whole model for ONNX Runtime
embeddings.parquet, clusters.parquet    tables of the images and of the clusters

An audit, as ``siammm audit`` leaves it for the report:

suspects.parquet, summary.json

What an interrupted ``siammm cluster`` of images keeps beside its result, until that is written:

rows.npy, rows.json   the embeddings so far, and what they are of
"""

from __future__ import annotations

CONFIG, METRICS, CHECKPOINTS, SET_ASIDE = "config.json", "metrics.jsonl", "checkpoints", "set_aside.json"
INVENTORY = "inventory.parquet"
MIXTURE, ENCODER, MERGES = "mixture.safetensors", "encoder.safetensors", "merges.json"
ASSIGNMENTS, EMBEDDINGS, LOCK = "assignments.parquet", "embeddings.npy", ".lock"
GROUP_NAMES, SELECTIONS = "names.json", "selections.json"
RUN_NAMES = frozenset(
    {CONFIG, INVENTORY, METRICS, CHECKPOINTS, SET_ASIDE, MIXTURE, ENCODER, MERGES, ASSIGNMENTS, EMBEDDINGS}
    | {GROUP_NAMES, SELECTIONS, "tensorboard"}
    | {"losses.svg", "clusters.svg"}  # of earlier versions
)
"""What a run consists of; a folder that holds anything else is not replaced."""

SUMMARY, IMAGES_TABLE = "summary.json", "embeddings.parquet"
CLUSTERED_NAMES = frozenset({SUMMARY, MIXTURE, ASSIGNMENTS, EMBEDDINGS, IMAGES_TABLE, GROUP_NAMES, SELECTIONS})
"""What a run of ``siammm cluster`` consists of; a folder that holds anything else is not replaced."""

TIMM_WEIGHTS, NETWORKS, CARD, ONNX = "model.safetensors", "siammm.safetensors", "README.md", "siammm.onnx"
CLUSTERS_TABLE = "clusters.parquet"
PRETRAINED_NAMES = (TIMM_WEIGHTS, CONFIG, NETWORKS, MIXTURE, CARD)
"""What ``save_pretrained`` writes and the hub is given."""
EXPORT_NAMES = frozenset({*PRETRAINED_NAMES, ONNX, IMAGES_TABLE, CLUSTERS_TABLE})
"""What an export consists of; a folder that holds anything else is not replaced."""

SUSPECTS = "suspects.parquet"
AUDIT_NAMES = frozenset({SUSPECTS, SUMMARY})
"""What an audit consists of; a folder that holds anything else is not replaced."""

ROWS, ROWS_FACTS = "rows.npy", "rows.json"

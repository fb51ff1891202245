"""Cluster a matrix of embeddings, find the number of clusters, and update them as more data arrives.

    python examples/cluster_embeddings.py [embeddings.npy]

Without a file it uses scikit-learn's digits, and scores the clusters with their labels.
"""

from __future__ import annotations

import sys

import numpy as np
from sklearn.datasets import load_digits

import siammm
from siammm.metrics import clustering_scores


def main(arguments: list[str]) -> None:
    say = sys.stdout.write
    labels = None
    if arguments:
        X = np.load(arguments[0], mmap_mode="r")
    else:
        X, labels = (np.asarray(part) for part in load_digits(return_X_y=True))

    # Start from several times as many components as you expect; merging finds the number of clusters.
    half = len(X) // 2
    mixture = siammm.VonMisesFisherMixture(n_components=min(200, half // 8), merge="auto", random_state=0).fit(X[:half])
    say(f"{mixture.n_components_} clusters, from {mixture.n_components}\n")

    # The size and concentration of the largest clusters.
    for cluster in np.argsort(-mixture.weights_)[:5]:
        share, tightness = mixture.weights_[cluster], mixture.concentrations_[cluster]
        say(f"  cluster {cluster}: {share:.0%} of the samples, concentration {tightness:.0f}\n")

    # More data: the clusters keep their numbers, because the fit starts from the previous one.
    mixture = siammm.VonMisesFisherMixture(random_state=0).fit(X, init=mixture)
    if labels is not None:
        scores = clustering_scores(labels, mixture.labels_)
        say(f"AMI with the labels, which it never saw: {scores.ami:.2f}\n")

    # Rows that fit nowhere, and rows between two clusters.
    shares = mixture.predict_proba(X)  # sparse: a few entries per row
    strangest = mixture.score_samples(X).argsort()[:5]
    undecided = np.asarray(shares.max(axis=1).todense()).ravel().argsort()[:5]
    say(f"strangest rows: {strangest.tolist()}; between two clusters: {undecided.tolist()}\n")

    mixture.save("clusters.safetensors")  # no pickle; VonMisesFisherMixture.load reads it anywhere


if __name__ == "__main__":
    main(sys.argv[1:])

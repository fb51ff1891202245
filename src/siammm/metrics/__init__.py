"""How good features and clusters are: arrays in, numbers out. Imports only core and mixture."""

from siammm.metrics.clustering import ClusteringScores, Purities, clustering_scores, mapped_accuracy, purities
from siammm.metrics.kmeans import k_means
from siammm.metrics.knn import knn_accuracies, knn_accuracy, knn_predict, knn_predictions
from siammm.metrics.linear import ProbeResult, linear_accuracy, linear_scores, out_of_fold_probabilities
from siammm.metrics.multilabel import MultiLabelResult, SvmSettings, average_precision, svm_map
from siammm.metrics.outliers import outlier_score

__all__ = [
    "ClusteringScores", "MultiLabelResult", "ProbeResult", "Purities", "SvmSettings", "average_precision",
    "clustering_scores", "k_means", "knn_accuracies", "knn_accuracy", "knn_predict", "knn_predictions",
    "linear_accuracy", "linear_scores", "mapped_accuracy", "out_of_fold_probabilities", "outlier_score", "purities",
    "svm_map",
]  # fmt: skip

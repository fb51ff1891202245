"""The statistics: mixtures of von Mises-Fisher or Gaussian components over any matrix of embeddings."""

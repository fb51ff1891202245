"""The statistics: mixtures of von Mises-Fisher or Gaussian components over embeddings. Imports core alone."""

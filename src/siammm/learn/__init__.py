"""Algorithm 1: train an encoder from unlabelled images, with the mixture as the objective."""

"""The paper's losses, for people who keep their own training loop.

All are functions of tensors, without state. Each one's docstring names its equation and shapes; docs/equations.md says
where they depart from the paper. A step of Algorithm 1, given predictions ``v_1, v_2`` and momentum embeddings
``v_1m, v_2m`` of a batch, a mixture's directions ``mu`` (K, D) and concentrations ``kappa`` (K,), and the components
``index`` (N, H) that are nearest to each of its samples::

    relative = relative_concentrations(kappa)  # once an epoch
    cluster = 0
    for v in (v_1, v_2):
        similarity = torch.cosine_similarity(v[:, None], mu[index], dim=2).detach()
        weight = assignment_weights(similarity, temperature=0.02)
        cluster = cluster + soft_assignment_loss(v, mu[index], relative[index], weight)
    loss = final_loss(cluster, instance_loss(v_1, v_2, v_1m, v_2m))
"""

from siammm.learn.losses import assignment_weights as assignment_weights
from siammm.learn.losses import contrastive_instance_loss as contrastive_instance_loss
from siammm.learn.losses import final_loss as final_loss
from siammm.learn.losses import group_loss as group_loss
from siammm.learn.losses import instance_distance as instance_distance
from siammm.learn.losses import instance_loss as instance_loss
from siammm.learn.losses import negative_centroids_loss as negative_centroids_loss
from siammm.learn.losses import negative_samples_loss as negative_samples_loss
from siammm.learn.losses import relative_concentrations as relative_concentrations
from siammm.learn.losses import soft_assignment_loss as soft_assignment_loss

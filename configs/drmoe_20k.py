"""DR-MoE for 20,000 labels: no array of size labels × labels; arrays per label sharded over `mesh.expert`.

    mlmoe compile --config=drmoe_20k --topology=v5e:4x4 --config.mesh.expert=16
    mlmoe train --config=drmoe_20k --config.mesh.expert=8 --workdir=runs/drmoe_20k

For random images with 20,000 labels, add --config.data.labels=20000. For your own images, set config.data.* instead.

The decoder has no self-attention between labels, all labels share one gate, and label features have width 256. Each
label has a query (256), one expert (256 → 64) and a classifier (64): 16,769 parameters. For memory, attention weights
have no dropout, and a batch is computed in 4 parts, whose size must divide over all devices. The focal weight of the
asymmetric loss keeps a few positives from being outweighed by 20,000 negatives.
"""

from mlmoe_jax.config.recipes.feature_map import feature_map_config, use_routed_experts


def get_config(arg=""):
    config, _ = feature_map_config(arg, dataset="synthetic", backbone="dinov2_vitb14", resolution=224)
    use_routed_experts(config, "recommended")
    decoder, routing = config.model.head.decoder, config.model.head.routing
    decoder.width, decoder.hidden, decoder.style = 256, 1024, "independent"
    decoder.attention_dropout, config.train.accumulate = False, 4
    routing.expert_hidden, routing.gate_hidden, routing.gate_share = 64, 64, "shared"
    config.loss.kind, config.loss.reduce = "asymmetric", "sum"
    config.loss.gamma_neg, config.loss.clip, config.loss.eps = 4.0, 0.05, 1e-8
    config.optim.learning_rate, config.optim.weight_decay = 1e-4, 1e-4
    config.train.epochs, config.train.batch_size, config.eval.batch_size = 40, 64, 8
    return config

"""DR-MoE for 20,000 labels: nothing of the size labels × labels, and what belongs to labels spread over `mesh.expert`.

    python -m mlmoe_jax.main --mode=compile --config=configs/drmoe_20k.py --topology=v5e:4x4 --config.mesh.expert=16
    python -m mlmoe_jax.main --config=configs/drmoe_20k.py --config.mesh.expert=8 --workdir=runs/drmoe_20k

dataset: synthetic (`--config.data.labels=20000` of them; the default), digits, or a benchmark with root=FOLDER; for
your own images set config.data.* instead. resolution: pixels, by default 224. backbone: any of
models.backbones.catalog, by default dinov2_vitb14. tune: yes | no | auto, whether the backbone learns; auto = a CNN
does, a ViT does not.

No decoder layer lets labels see one another, one gate serves all labels, and label features are 256 wide: a label owns
a query (256), one expert (256 → 64) and a classifier (64), 16,769 numbers. The focal weight of the asymmetric loss is
what lets a few positives count beside 20,000 negatives.
"""

from mlmoe_jax.config.recipes.feature_map import feature_map, use_routed_experts


def get_config(arg=""):
    config, _ = feature_map(arg, dataset="synthetic", backbone="dinov2_vitb14", resolution=224)
    use_routed_experts(config, "recommended")
    decoder, routing = config.model.head.decoder, config.model.head.routing
    decoder.width, decoder.hidden, decoder.self_attention = 256, 1024, "none"
    routing.expert_hidden, routing.gate_hidden, routing.gate_share = 64, 64, "shared"
    config.loss.kind, config.loss.reduce = "asymmetric", "sum"
    config.loss.gamma_neg, config.loss.clip, config.loss.eps = 4.0, 0.05, 1e-8
    config.optim.learning_rate, config.optim.weight_decay = 1e-4, 1e-4
    config.train.epochs, config.train.batch_size, config.eval.batch_size = 40, 64, 8
    return config

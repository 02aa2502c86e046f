"""HSQ on ResNet-101, a RECONSTRUCTION (Yin et al., ICLR 2024): hybrid sharing of experts between label queries.

    python -m mlmoe_jax.main --config=configs/hsq_resnet101.py:root=/data/coco --workdir=runs/hsq
    python -m mlmoe_jax.main --config=configs/hsq_resnet101.py:dataset=digits --workdir=runs/hsq_digits

Its code was never published. Known are a query decoder, task experts of each label and shared ones, and a gate a label
over both that depends on the label's feature; numbers, widths and recipe are ours, after Query2Label.

task, shared: experts of a label, and of all labels.
dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER, or digits, which needs no download.
resolution: pixels. backbone: any of models.backbones.catalog; by default resnet101, for digits vit_digits. tune:
yes | no | auto, whether the backbone learns; auto = a CNN does, as published, a ViT does not.
"""

from mlmoe_jax.config.recipes.feature_map import feature_map, q2l_recipe, small, use_q2l, use_routed_experts


def get_config(arg=""):
    config, options = feature_map(arg, task=2, shared=4)
    use_q2l(config)
    config.model.head.decoder.width, config.model.head.decoder.hidden = 512, 2048
    use_routed_experts(config, "hsq")
    config.model.head.routing.task_experts, config.model.head.routing.shared_experts = options.task, options.shared
    if options.dataset == "digits":
        return small(config, rate=1e-3)
    q2l_recipe(config)
    return config

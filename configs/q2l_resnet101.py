"""Query2Label on ResNet-101 (Liu et al., 2021): a query a label reads the map through a transformer decoder.

    python -m mlmoe_jax.main --config=configs/q2l_resnet101.py:root=/data/coco --workdir=runs/q2l
    python -m mlmoe_jax.main --config=configs/q2l_resnet101.py:dataset=digits --workdir=runs/q2l_digits

dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER, or digits, which needs no download.
resolution: pixels. backbone: any of models.backbones.catalog; by default resnet101, for digits vit_digits. tune:
yes | no | auto, whether the backbone learns; auto = a CNN does, as published, a ViT does not.

AdamW with weight decay 0.01 on everything, one-cycle to 1e-4, 80 epochs of batches of 64, EMA; batch normalisation,
stem and first stage frozen; pictures without any label are kept. The authors' loader cuts no hole out although their
paper says so; here it does.
"""

from mlmoe_jax.config.recipes.feature_map import feature_map, q2l_recipe, small, use_q2l


def get_config(arg=""):
    config, options = feature_map(arg)
    use_q2l(config)
    if options.dataset == "digits":
        return small(config, rate=1e-3)
    config.data.keep_empty = True
    q2l_recipe(config)
    return config

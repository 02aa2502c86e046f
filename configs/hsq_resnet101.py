"""HSQ on ResNet-101, a RECONSTRUCTION (Yin et al., ICLR 2024): hybrid sharing of experts between label queries.

    mlmoe train --config=hsq_resnet101:root=/data/coco --workdir=runs/hsq
    mlmoe train --config=hsq_resnet101:dataset=digits --workdir=runs/hsq_digits

The authors published no code. The paper describes a query decoder, task experts per label, shared experts, and one gate
per label over both that depends on the label's feature. Numbers, widths and recipe are our choice, after Query2Label.
"""

from mlmoe_jax.config import option
from mlmoe_jax.config.recipes.benchmarks import evaluate_like
from mlmoe_jax.config.recipes.feature_map import (
    feature_map_config,
    set_q2l_training,
    shrink_for_digits,
    use_q2l,
    use_routed_experts,
)


def get_config(arg=""):
    config, options = feature_map_config(
        arg,
        task=option("model.head.routing.task_experts", default=2),
        shared=option("model.head.routing.shared_experts"),
    )
    use_q2l(config)
    config.model.head.decoder.width, config.model.head.decoder.hidden = 512, 2048
    use_routed_experts(config, "hsq")
    config.model.head.routing.task_experts, config.model.head.routing.shared_experts = options.task, options.shared
    if options.dataset == "digits":
        return shrink_for_digits(config, rate=1e-3)
    evaluate_like(config, "drmoe")  # HSQ's evaluator is not public; DR-MoE quotes HSQ's numbers
    set_q2l_training(config, options.tune)
    return config

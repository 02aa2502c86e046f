"""GateVPT: prompts passed through a frozen ViT, with one learned gate per block (Yoo et al., ICML 2023).

    mlmoe train --config=gatevpt:dataset=digits --workdir=runs/gatevpt_digits
    mlmoe train --config=gatevpt:root=/data/coco,temperature=true --workdir=runs/gatevpt

gates: false omits the gates, which gives VPT-shallow. gate_init: gates start at sigmoid(-gate_init), nearly closed; the
authors' code uses 10, its example 5. temperature: also learn one attention temperature per block, clipped to 0.01 … 10,
as in the authors' runs. prompts: number of prompts (0 = 30; 18 on digits). dropout: dropout rate of prompts, 0.1 in the
authors' runs.
pool: cls (the class token, as in the ML-VPT paper's comparison) | mean (of prompts and patches, as the authors' code on
MAE).
dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER; or digits, which needs no download.
resolution: 224 | 448. backbone: a ViT in models.backbones.catalog; default dinov2_vitb14, on digits vit_digits.
preset: code (learning rate and EMA of the authors' configs; the default) | paper (5e-4 and 0.9997 everywhere).
selection=held_out, or preset=held_out: select weights and fit thresholds on a tenth of the training images, not test.
precision: auto (the default: float32 on a CPU, else bfloat16) | float32 | authors (bfloat16, evaluation in float16).
"""

from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning_config


def get_config(arg=""):
    config, options = prompt_tuning_config(
        arg, digits_rate=1e-2, gates=True, gate_init=10.0, temperature=False, prompts=0, dropout=0.0, pool="cls"
    )
    prompts = config.model.prompts
    prompts.kind, prompts.count, prompts.dropout = "shallow", options.prompts or prompts.count, options.dropout
    prompts.gated, prompts.gate_init, prompts.learn_temperature = options.gates, options.gate_init, options.temperature
    config.model.head.pool = options.pool
    return config

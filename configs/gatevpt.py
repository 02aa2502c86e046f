"""GateVPT: prompts that travel through a frozen ViT, a learned gate a block (Yoo et al., ICML 2023).

    python -m mlmoe_jax.main --config=configs/gatevpt.py:dataset=digits --workdir=runs/gatevpt_digits
    python -m mlmoe_jax.main --config=configs/gatevpt.py:root=/data/coco,temperature=true --workdir=runs/gatevpt

gates: false leaves the gates out, which is VPT-shallow. gate_init: a gate starts at sigmoid(-gate_init), nearly closed;
the authors' code has 10, its example 5. temperature: also learn a temperature of the attention a block, within 0.01 and
10, as the authors' runs do. prompts: how many (0 = 30; 18 on digits). dropout: of prompts; the authors' runs have 0.1.
dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER, or digits, which needs no download.
resolution: 224 | 448. backbone: a ViT of models.backbones.catalog; by default dinov2_vitb14, for digits vit_digits.
preset: code (learning rate and EMA of the authors' configs; the default) | paper (5e-4 and 0.9997 everywhere).
"""

from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning


def get_config(arg=""):
    config, options = prompt_tuning(
        arg, digits_rate=1e-2, gates=True, gate_init=10.0, temperature=False, prompts=0, dropout=0.0
    )
    prompts = config.model.prompts
    prompts.kind, prompts.count, prompts.dropout = "shallow", options.prompts or prompts.count, options.dropout
    prompts.gated, prompts.gate_init, prompts.learn_temperature = options.gates, options.gate_init, options.temperature
    return config

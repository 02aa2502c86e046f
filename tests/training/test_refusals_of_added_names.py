"""Labels that cannot be added to a model by their names."""

from functools import partial

import pytest
from helpers.bench import drawn_model
from helpers.named_runs import Q2L, write_run
from helpers.refusals import Refusal, each

from mlmoe_jax.runs.assemble import split_model
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.training.import_run import import_run

pytestmark = pytest.mark.usefixtures("run")  # the smallest backbone


def refused(name, *says, then=None, **changes) -> Refusal:
    """The addition of labels to a run with these changes; `then` changes the config of the addition."""

    def drawn(config, space):
        return split_model(drawn_model(config, space), config)

    def make(at):
        config = write_run(at, drawn, **changes)
        return (then or (lambda config: config))(config), RunFolder(at / "more")

    return Refusal(name, make, lambda given: import_run(*given), *says)


def with_queries_of_width(config, width):
    config.model.head.decoder.width = width
    return config


REFUSALS = [
    refused(
        "experts of each label",
        "because head/classifier/bias has values for each label; train with head query, or routed_experts with",
        model__head__kind="routed_experts",
        model__head__decoder__style="independent",
    ),
    refused(
        "a linear path of each label",
        "because head/pooled/bias has values for each label",
        model__head__residual="pooled",
        **Q2L,
    ),
    refused(
        "queries that attend to one another",
        "cannot be added to a model with head query by its name, because its queries attend to one another",
        **(Q2L | {"model__head__decoder__style": "q2l_self_attention"}),
    ),
    refused(
        "another decoder",
        "is not as in {at}/run; give the config with which this run was trained",
        then=partial(with_queries_of_width, width=4),
        **Q2L,
    ),
]


@each(REFUSALS)
def test_refusals(case, tmp_path):
    case.check(tmp_path)

"""Settings of the methods, chosen for collections by a search on training images that were held out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.methods.deep_ensemble import DeepEnsemble
from checkpoints_zoo.methods.dropout import Dropout
from checkpoints_zoo.methods.hmc import Hmc
from checkpoints_zoo.methods.laplace import Laplace, LaplaceLastLayer
from checkpoints_zoo.methods.method import Method
from checkpoints_zoo.methods.sgmcmc import CyclicalSghmc, Sghmc, Sgld
from checkpoints_zoo.methods.snapshot import Snapshot
from checkpoints_zoo.methods.swag import Swag
from checkpoints_zoo.methods.vi import MeanField

METHODS: dict[str, type[Method]] = {
    "dropout": Dropout,
    "vi": MeanField,
    "swag": Swag,
    "laplace": Laplace,
    "laplace-last-layer": LaplaceLastLayer,
    "sgld": Sgld,
    "sghmc": Sghmc,
    "csghmc": CyclicalSghmc,
    "hmc": Hmc,
    "snapshot": Snapshot,
    "deep-ensemble": DeepEnsemble,
}

# Chosen by the NLL that the draws of one mode have together on the last 250 training images (in rank order), fitted to
# the others; the test split was never looked at. A collection that is not here has the defaults.
CHOSEN: Mapping[str, Mapping[str, Method]] = {
    "convnet-digits": {  # the search's record is in docs/studies/comparison.json
        "dropout": Dropout(rate=0.02),
        "vi": MeanField(lr=0.01, steps=1000, temperature=0.03),
        "swag": Swag(lr=0.05, epochs=20, scale=2.0),
        "laplace": Laplace("evidence", 0.01),
        "laplace-last-layer": LaplaceLastLayer("weight-decay", 0.03),
        "sgld": Sgld(lr=0.03, temperature=0.03, burn_in=500, thinning=20),
        "sghmc": Sghmc(lr=0.01, friction=0.1, temperature=0.3, burn_in=500, thinning=20),
        "csghmc": CyclicalSghmc(lr=0.03, friction=0.1, temperature=1.0, cycles=5, steps=500),
        "hmc": Hmc(temperature=1.0, steps=6, warmup=20),
        "snapshot": Snapshot(lr=0.1, cycle=1),
    },
    "resnet8-digits": {
        "dropout": Dropout(rate=0.01),
        "vi": MeanField(lr=0.01, steps=300, temperature=0.1),
        "swag": Swag(lr=0.05, epochs=20, scale=0.5),
        "laplace": Laplace("evidence", 0.003),
        "laplace-last-layer": LaplaceLastLayer("weight-decay", 0.01),
        "sgld": Sgld(lr=0.03, temperature=0.03, burn_in=100, thinning=5),
        "sghmc": Sghmc(lr=0.03, friction=0.3, temperature=0.03, burn_in=100, thinning=5),
        "csghmc": CyclicalSghmc(lr=0.1, friction=0.3, temperature=0.1, cycles=3, steps=150),
        "snapshot": Snapshot(lr=0.05, cycle=1),
    },
}


def method_of(name: str, collection: str) -> Method:
    """Return a method with the settings chosen for a collection, or its defaults.

    Raises:
        UsageError: no such method; the nearest name is given.

    >>> method_of("swag", "convnet-digits").name
    'swag'
    """
    if name not in METHODS:
        nearest = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.0)[0]
        raise UsageError(
            f"method {name!r}",
            expected=f"one of {', '.join(METHODS)}",
            found="no such name",
            do=f"Did you mean {nearest}?",
        )
    return CHOSEN.get(collection, {}).get(name) or METHODS[name]()

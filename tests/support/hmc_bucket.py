"""A small replica of the bucket of HMC draws: pickles that a stub class of haiku's mapping writes byte for byte."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from tests.support.haiku_network import Parameters, drawn_parameters

HAIKU = "haiku._src.data_structures"
FOLDER = "/gresearch/bnn-posteriors/v1/hmc/cifar10"
CHAINS = 3


@contextmanager
def haiku_mapping(name: str = "FlatMapping") -> Iterator[type]:
    """Give a class that is pickled as haiku's mapping of that name is: by its name, and a dict."""
    module = types.ModuleType(HAIKU)

    def init(self: Any, mapping: Any) -> None:
        self.mapping = mapping

    def reduce(self: Any) -> Any:
        return type(self), (self.mapping,)

    names = ["haiku", "haiku._src", HAIKU]
    kind = type(name, (), {"__init__": init, "__reduce__": reduce, "__module__": HAIKU})
    setattr(module, name, kind)
    sys.modules.update(dict.fromkeys(names, module))
    try:
        yield kind
    finally:
        for name in names:
            del sys.modules[name]


def draws_of_file(number: int) -> Parameters:
    """Return the parameters of a file, float32, with the chain as the first axis; they are the same each time."""
    return {module: dict(arrays) for module, arrays in _drawn(number).items()}


@cache
def _drawn(number: int) -> Parameters:
    chains = [drawn_parameters(CHAINS * number + chain) for chain in range(CHAINS)]
    return {m: {n: np.stack([c[m][n] for c in chains]).astype(np.float32) for n in own} for m, own in chains[0].items()}


def pickled(parameters: Parameters, protocol: int) -> bytes:
    """Pickle parameters as `{"params": FlatMapping, "net_state": FlatMapping}`."""
    with haiku_mapping() as kind:
        inner = {module: kind(arrays) for module, arrays in parameters.items()}
        return pickle.dumps({"params": kind(inner), "net_state": kind({})}, protocol)


def bucket(count: int, folder: str = FOLDER) -> dict[str, bytes]:
    """Return path -> content of the first files of the bucket, of protocols 2 to 5 in turn."""
    return {f"{folder}/state-{n}.pkl": pickled(draws_of_file(n), 2 + n % 4) for n in range(count)}

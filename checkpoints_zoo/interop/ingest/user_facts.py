"""Check the facts on a collection that the user supplies; make its description of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.formats.catalog import Description, Listing
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.interop.ingest.networks import Build
from checkpoints_zoo.sources.finding import open_source
from checkpoints_zoo.sources.folder_source import FolderSource
from checkpoints_zoo.sources.revisions import expand_braces, parse_model_address

EMPTY_FACTS: dict[str, Any] = {
    "title": "", "dataset": "", "classes": (), "preprocessing": {}, "licence": "", "citation": "",
}  # fmt: skip
IMAGE_FACTS = ("dataset", "classes", "preprocessing")
FORWARD_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    IndexError,
)  # exceptions that nets raise for inputs of a wrong shape


def make_description(
    name: str,
    net_facts: Mapping[str, Any],
    layouts: Mapping[str, Layout],
    user_facts: Mapping[str, Any],
    like: str | None,
) -> Description:
    """Return the description of a collection from the user's facts, the catalog and the members.

    Args:
        name: name of the collection. If the catalog has this name, the catalog supplies the facts that the user leaves
            out.
        net_facts: architecture and arguments of the members.
        layouts: layouts of the members.
        user_facts: the user's facts: title, dataset, classes, preprocessing, licence and citation.
        like: name of a collection of the catalog with the same images, whose facts on the images are copied.

    Raises:
        CollectionNotFound: `like` is not in the catalog.
        UsageError: a fact has an unknown name or another type, or contradicts the members.
        FormatError: invalid preprocessing.
    """
    if unknown := sorted(set(user_facts) - set(EMPTY_FACTS)):
        raise UsageError("facts of a collection", expected=f"{', '.join(EMPTY_FACTS)}", found=", ".join(unknown))
    facts = dict(EMPTY_FACTS)
    listing = catalog.listing_of(name)
    if listing:
        facts |= _facts_of_listing(listing)
        if listing.architecture != net_facts["architecture"]:
            raise UsageError(
                f"collection {name}",
                expected=f"members of {listing.architecture}, as the catalog says",
                found=net_facts["architecture"],
                do="Give the collection another name",
                collection=name,
            )
    if like is not None:
        like_facts = _facts_of_listing(catalog.find_listing(like))
        facts |= {fact: like_facts[fact] for fact in IMAGE_FACTS}
    names = user_facts.get("classes", ())
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UsageError("classes of a collection", expected="a list of names", found=repr(names)[:80])
    if "preprocessing" in user_facts:
        from checkpoints_zoo.images import Preprocess

        Preprocess.from_json(user_facts["preprocessing"])
    facts |= user_facts
    values = {
        "format_version": catalog.FORMAT_VERSION, "name": name, **facts, "classes": list(facts["classes"]), **net_facts,
        "layouts": {key: layout.to_json() for key, layout in layouts.items()},
    }  # fmt: skip
    description = Description.from_json(values, Path(f"of {name}"))
    classes = net_facts["arguments"].get("classes", len(description.classes))
    if description.classes and len(description.classes) != classes:
        raise UsageError(
            f"classes of {name}",
            expected=f"{classes}, as many as the members' logits",
            found=f"{len(description.classes)}",
            collection=name,
        )
    return description


def check_net(description: Description, build: Build | None) -> None:
    """Check that the user's net takes the images of its description and returns a logit for each class.

    Args:
        description: description of the members; without classes or preprocessing nothing is checked.
        build: function that builds the net; None for a net of the package.

    Raises:
        UsageError: the net does not take the images, or returns another number of logits.
    """
    if build is None or not description.classes or not description.preprocessing:
        return
    import torch

    from checkpoints_zoo.images import Preprocess

    preprocess = Preprocess.from_json(description.preprocessing)
    shape = (2, preprocess.channels, *preprocess.size)

    def run_net(device: str) -> Any:
        with torch.device(device), torch.no_grad():
            return build().eval()(torch.zeros(shape))

    try:
        logits = run_net("meta")
    except FORWARD_ERRORS:  # some nets fail on the meta device, but not on a CPU
        try:
            logits = run_net("cpu")
        except FORWARD_ERRORS as error:
            raise UsageError(
                f"architecture of {description.name}",
                expected=f"a net for inputs {(*shape[1:],)}, the shape in its preprocessing",
                found=f"{type(error).__name__}: {error}".partition("\n")[0][:160],
                collection=description.name,
            ) from error
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        found = f"shape {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__}"
        raise UsageError(f"architecture of {description.name}", expected="a net that returns logits (input, class)",
                         found=found, collection=description.name)  # fmt: skip
    if logits.shape[1] != len(description.classes):
        raise UsageError(
            f"classes of {description.name}",
            expected=f"{logits.shape[1]}, as many as the members' logits",
            found=f"{len(description.classes)}",
            collection=description.name,
        )


def _facts_of_listing(listing: Listing) -> dict[str, Any]:
    """Return the facts of a collection from the catalog, or from the source that the catalog names."""
    facts = {fact: getattr(listing, fact) for fact in ("title", "dataset", "licence")}
    if parse_model_address(expand_braces(listing.sources[0])[0]):  # Model repos have no description to read.
        return facts
    if listing.stated is None:
        description = open_source(None, listing.name).read_collection(listing.name)[0]
        return {f.name: getattr(description, f.name) for f in fields(description) if f.name in EMPTY_FACTS}
    return facts | {fact: getattr(listing.stated, fact) for fact in ("classes", "preprocessing", "citation")}


def keep_earlier_facts(
    description: Description, user_facts: Mapping[str, Any], like: str | None, target: FolderSource
) -> Description:
    """Return a description in which facts that the user leaves out come from the folder's earlier description.

    Args:
        description: the new description.
        user_facts, like: the same arguments as in `make_description`.
        target: the folder of the source.
    """
    path = target.description_path(description.name)
    if not path.is_file() or not target.manifest_path(description.name).is_file():
        return description
    return with_earlier_facts(description, user_facts, like, Description.from_json(catalog.read_json(path), path))


def with_earlier_facts(
    description: Description, user_facts: Mapping[str, Any], like: str | None, old_description: Description
) -> Description:
    """Return a description with the facts of an earlier description, except facts that the user supplies now.

    Args:
        description: the new description.
        user_facts, like: the same arguments as in `make_description`.
        old_description: the earlier description, whose facts may have been edited by hand.
    """
    replaced_facts = {*user_facts, *(IMAGE_FACTS if like is not None else ())}
    earlier_facts = {fact: getattr(old_description, fact) for fact in EMPTY_FACTS if fact not in replaced_facts}
    values = {f.name: getattr(description, f.name) for f in fields(description)}
    return Description(**{**values, **earlier_facts})

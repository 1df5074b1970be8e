"""What files of weights can't tell of a collection: its images, classes, preprocessing, licence and how to cite it."""

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
from checkpoints_zoo.sources.finding import resolve
from checkpoints_zoo.sources.source import Source

EMPTY: dict[str, Any] = {
    "title": "", "dataset": "", "classes": (), "preprocessing": {}, "licence": "", "citation": "",
}  # fmt: skip
OF_IMAGES = ("dataset", "classes", "preprocessing")
REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError, IndexError)  # what nets raise for other inputs


def described(
    name: str, net: Mapping[str, Any], layouts: Mapping[str, Layout], given: Mapping[str, Any], like: str | None
) -> Description:
    """Put together what is known of a collection; return the description.

    Args:
        name: of the collection. If the catalog knows it, it says what is not given.
        net: architecture and arguments, as the members' tensors say.
        layouts: of the members.
        given: facts by the user: fields of `Description` among title, dataset, classes, preprocessing, licence and
            citation.
        like: another collection of the catalog, whose images the members are for.

    Raises:
        CollectionNotFound: no such collection in the catalog.
        UsageError: facts of another name or type, or that contradict the members.
        FormatError: preprocessing that is none.
    """
    if unknown := sorted(set(given) - set(EMPTY)):
        raise UsageError("facts of a collection", expected=f"{', '.join(EMPTY)}", found=", ".join(unknown))
    known = dict(EMPTY)
    listing = catalog.collections().get(name)
    if listing:
        known |= _of(listing)
        if listing.architecture != net["architecture"]:
            raise UsageError(
                f"collection {name}",
                expected=f"members of {listing.architecture}, as the catalog says",
                found=net["architecture"],
                do="Give the collection another name",
                collection=name,
            )
    if like is not None:
        of_like = _of(catalog.listing(like))
        known |= {fact: of_like[fact] for fact in OF_IMAGES}
    names = given.get("classes", ())
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UsageError("classes of a collection", expected="a list of names", found=repr(names)[:80])
    if "preprocessing" in given:
        from checkpoints_zoo.images import Preprocess

        Preprocess.from_json(given["preprocessing"])
    known |= given
    values = {
        "format_version": catalog.FORMAT_VERSION, "name": name, **known, "classes": list(known["classes"]), **net,
        "layouts": {key: layout.to_json() for key, layout in layouts.items()},
    }  # fmt: skip
    description = Description.from_json(values, Path(f"of {name}"))
    classes = net["arguments"].get("classes", len(description.classes))
    if description.classes and len(description.classes) != classes:
        raise UsageError(
            f"classes of {name}",
            expected=f"{classes}, as many as the members' logits",
            found=f"{len(description.classes)}",
            collection=name,
        )
    return description


def check_net(description: Description, build: Build | None) -> None:
    """Check that a net of the user's own takes the images of its description and gives a logit for each class.

    Args:
        description: of its members; where it names no classes or no preprocessing, nothing can be said.
        build: builds the net; None for one of the package.

    Raises:
        UsageError: it does not.
    """
    if build is None or not description.classes or not description.preprocessing:
        return
    import torch

    from checkpoints_zoo.images import Preprocess

    takes = Preprocess.from_json(description.preprocessing)
    shape = (2, takes.channels, *takes.size)

    def run(device: str) -> Any:
        with torch.device(device), torch.no_grad():
            return build().eval()(torch.zeros(shape))

    try:
        logits = run("meta")
    except REFUSALS:  # or it looks at values
        try:
            logits = run("cpu")
        except REFUSALS as error:
            raise UsageError(
                f"architecture of {description.name}",
                expected=f"a net that takes inputs {(*shape[1:],)}, as its preprocessing says",
                found=f"{type(error).__name__}: {error}".partition("\n")[0][:160],
                collection=description.name,
            ) from error
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        found = f"shape {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__}"
        raise UsageError(f"architecture of {description.name}", expected="a net that gives logits (input, class)",
                         found=found, collection=description.name)  # fmt: skip
    if logits.shape[1] != len(description.classes):
        raise UsageError(
            f"classes of {description.name}",
            expected=f"{logits.shape[1]}, as many as the members' logits",
            found=f"{len(description.classes)}",
            collection=description.name,
        )


def _of(listing: Listing) -> dict[str, Any]:
    """Return what the catalog, or a source that it names, says of a collection."""
    archives = listing.archives
    if archives is None:
        description = resolve(None, listing.name).read(listing.name)[0]
        return {f.name: getattr(description, f.name) for f in fields(description) if f.name in EMPTY}
    facts = {fact: getattr(archives, fact) for fact in ("classes", "preprocessing", "citation")}
    return facts | {"title": listing.title, "dataset": listing.dataset, "licence": listing.licence}


def kept(description: Description, given: Mapping[str, Any], like: str | None, target: Source) -> Description:
    """Return a description with the facts that the one in a folder has already, where the user gives none now.

    Args:
        description: made anew.
        given, like: as in `described`.
        target: the folder.
    """
    path = target.description_path(description.name)
    if not path.is_file() or not target.manifest_path(description.name).is_file():
        return description
    return renewed(description, given, like, Description.from_json(catalog.read_json(path), path))


def renewed(description: Description, given: Mapping[str, Any], like: str | None, old: Description) -> Description:
    """Return the description that is there already, with the facts that the user gives now.

    Args:
        description: made anew.
        given, like: as in `described`.
        old: the one that is there, whose facts may have been written by hand.
    """
    anew = {*given, *(OF_IMAGES if like is not None else ())}
    kept = {fact: getattr(old, fact) for fact in EMPTY if fact not in anew}
    values = {f.name: getattr(description, f.name) for f in fields(description)}
    return Description(**{**values, **kept})

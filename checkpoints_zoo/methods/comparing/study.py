"""`zoo.compare`: check the arguments, fit methods, and measure their draws cell by cell against the population."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from checkpoints_zoo.collection.collection import Collection, load
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import arguments
from checkpoints_zoo.formats.text import whole_number
from checkpoints_zoo.images import ImageInput
from checkpoints_zoo.methods.comparing.comparison import Comparison
from checkpoints_zoo.methods.comparing.draw_ensembles import group_draws
from checkpoints_zoo.methods.comparing.draws import MethodFits, available_methods, check_custom_draws
from checkpoints_zoo.methods.comparing.measures import Closeness, Predictive, Uncertainty, choose_images
from checkpoints_zoo.methods.comparing.prepared import PreparedComparison, Say
from checkpoints_zoo.methods.comparing.stored_logits import StoredLogits
from checkpoints_zoo.methods.fitting import DEFAULT_DRAWS, DEFAULT_RUNS
from checkpoints_zoo.networks.device import check_device
from checkpoints_zoo.training import recipes
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.workers import usable_cores

DEFAULT_PERMUTATIONS = 999
JACKKNIFE_SUBSETS = 100  # Number of subsets of runs or members for the jackknife.


def prepare_comparison(
    collection: Collection | str,
    methods: Iterable[str] | None = None,
    data: ImageInput | None = None,
    ood: ImageInput | None = None,
    *,
    out: str | Path | None = None,
    reference: Collection | str | None = None,
    draws: Mapping[str, Collection] | None = None,
    recipe: Recipe | None = None,
    runs: int = DEFAULT_RUNS,
    per_run: int = DEFAULT_DRAWS,
    permutations: int = DEFAULT_PERMUTATIONS,
    search: bool = False,
    workers: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    say: Say = lambda text: None,
) -> PreparedComparison:
    """Check the arguments of `compare`; return the comparison with nothing fitted or measured yet.

    Arguments and errors are the same as in `compare`.
    """
    numbers = {"runs": (runs, 1), "per_run": (per_run, 2), "permutations": (permutations, 1)}
    for option_name, (number, smallest) in (numbers | ({} if workers is None else {"workers": (workers, 1)})).items():
        if (integer := whole_number(number)) is None or integer < smallest:
            raise UsageError(option_name, expected=f"a whole number from {smallest}", found=repr(number)[:80])
    runs, per_run, permutations = int(runs), int(per_run), int(permutations)
    seed = arguments.check_seed(seed)
    check_device(device)
    fitted_collection = load(collection) if isinstance(collection, str) else collection
    reference_members = (
        fitted_collection if reference is None else load(reference) if isinstance(reference, str) else reference
    )
    for members in (fitted_collection, reference_members):
        if not isinstance(members, Collection):
            raise UsageError(
                "collection", expected="a Collection or its name", found=type(members).__name__,
                do="`zoo.compare_predictives` compares predictions without weights",
            )  # fmt: skip
    if len(reference_members) < 4:
        expected = "4 members or more: its halves are compared with each other"
        raise UsageError(f"reference {reference_members.name}", expected=expected, found=str(len(reference_members)))
    root = Path(f"{fitted_collection.name}-compared" if out is None else out).expanduser().absolute()
    if root.exists() and not root.is_dir():
        raise UsageError(f"out {root}", expected="a folder, or a name that is free", found="a file")
    requested_names = None if methods is None else [methods] if isinstance(methods, str) else list(methods)
    fitted_methods, unavailable = available_methods(requested_names, fitted_collection.name)
    fits = None
    if fitted_methods:
        recipe = _find_recipe(fitted_collection, recipe, required=requested_names is not None or not draws)
        fits = None if recipe is None else MethodFits(recipe, root, runs, per_run, seed, search, device)
        fitted_methods, unavailable = (fitted_methods, unavailable) if fits is not None else ([], {})
    if fits is not None:
        _check_same_network(f"methods fitted to {fitted_collection.name}", fitted_collection, reference_members)
    custom_draws = check_custom_draws(draws, [m.name for m in fitted_methods])
    for draw in custom_draws:
        _check_same_network(f"draws {draw.name!r}", draw.members, reference_members)
        group_draws(draw.name, draw.members)
    test_images, ood_images = choose_images(reference_members, data, ood)
    return PreparedComparison(
        name=fitted_collection.name,
        reference=reference_members,
        closeness=Closeness(reference_members, permutations, JACKKNIFE_SUBSETS, seed, device),
        predictive=Predictive(
            reference_members, test_images, JACKKNIFE_SUBSETS, seed, device, StoredLogits(root / "logits")
        ),
        uncertainty=Uncertainty(
            test_images, ood_images, JACKKNIFE_SUBSETS, seed, device, StoredLogits(root / "logits")
        ),
        out=root,
        fits=fits,
        methods=tuple(fitted_methods),
        named=requested_names is not None,
        unavailable=unavailable,
        custom_draws=tuple(custom_draws),
        workers=usable_cores() if workers is None else workers,
        say=say,
    )


def _find_recipe(members: Collection, recipe: Recipe | None, *, required: bool) -> Recipe | None:
    """Find the recipe of members; return the recipe, or None if the members have no recipe and none is required.

    Raises:
        UsageError: the members have no recipe, or the recipe is not the recipe that the members' rows name.
    """
    if recipe is None and members.name not in recipes.RECIPES:
        if not required:
            return None
        raise UsageError(
            f"recipe of {members.name}",
            expected=f"a collection of the package's recipes ({', '.join(recipes.RECIPES)}), or one that is given",
            found="neither",
            do="Give the recipe that its members were trained by (recipe=, --recipe), or no methods and draws of yours",
        )
    found_recipe = recipes.recipe_by_name(members.name) if recipe is None else recipe
    hashes = set(members.rows.column("recipe_hash").to_pylist()) - {None}
    if hashes - {found_recipe.hash}:
        raise UsageError(
            f"recipe of {members.name}",
            expected=f"the one that its members were trained by, {', '.join(sorted(hashes))}",
            found=f"{found_recipe.name}, {found_recipe.hash}",
            do="Methods have to approximate the posterior that the population is of",
        )
    return found_recipe


def _check_same_network(name_in_errors: str, members: Collection, reference: Collection) -> None:
    """Check that members have the reference's tensors.

    Args:
        name_in_errors: description of the members, for the error.
        members, reference: collections to be compared.

    Raises:
        UsageError: the members have other tensors.
    """
    shapes, expected_shapes = (
        {n: tuple(t.shape) for n, t in c._skeleton().named_parameters()} for c in (members, reference)
    )
    if shapes != expected_shapes:
        differing_names = [n for n in {**expected_shapes, **shapes} if shapes.get(n) != expected_shapes.get(n)]
        raise UsageError(
            name_in_errors,
            expected=f"the tensors of {reference.name}",
            found=f"others, such as {differing_names[0]!r}",
            do="All draws have to be of the reference's network",
        )


def compare(
    collection: Collection | str,
    methods: Iterable[str] | None = None,
    data: ImageInput | None = None,
    ood: ImageInput | None = None,
    *,
    out: str | Path | None = None,
    reference: Collection | str | None = None,
    draws: Mapping[str, Collection] | None = None,
    recipe: Recipe | None = None,
    runs: int = DEFAULT_RUNS,
    per_run: int = DEFAULT_DRAWS,
    permutations: int = DEFAULT_PERMUTATIONS,
    search: bool = False,
    workers: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    say: Say = lambda text: None,
) -> Comparison:
    """Compare approximate posteriors with a population: MMD, NS, accuracy, calibration, OOD, diversity; return all.

    Methods are fitted to the collection's recipe. Fits and measurements with the same settings are read from the folder
    if they exist, so an interrupted call can be repeated, and continues.

    Args:
        collection: a collection, or its name.
        methods: names of the methods; None for all methods whose packages are installed, () for none.
        data: labelled images, as in `zoo.evaluate`; None for the collection's own test set.
        ood: images out of distribution; None for the data set's default (digits: photos; CIFAR and
            Tiny-ImageNet: SVHN; MNIST: Fashion-MNIST), "none" for no images out of distribution.
        out: folder of draws, cells and comparison.json; None for NAME-compared.
        reference: another population to compare with, of the same architecture; None for the collection.
        draws: name -> your own draws, as returned by `zoo.from_samples`.
        recipe: recipe of the collection, if it is not one of the package's.
        runs, per_run: number of fits of a method, and number of draws of each fit.
        permutations: number of permutations of the test.
        search: whether settings are searched for on held-out training images; if not, methods have the settings of an
            earlier search on this collection, or their defaults.
        workers: number of worker processes; None for one per core.
        device: device to fit and measure on.
        seed: seed of the methods' fits, of the test's permutations and of the random subsets.
        say: function that is called with lines of text on the progress.

    Raises:
        UsageError: there is no such method, a named method can't be fitted here, draws are of another network, the
            collection has no recipe, or an argument is invalid.
        DamagedError, SourceNotFound, NetworkError, StorageError: members or images can't be read, or the disk is full.

    >>> import tempfile
    >>> import checkpoints_zoo as zoo
    >>> members = zoo.load("convnet-digits")
    >>> with tempfile.TemporaryDirectory() as out:
    ...     comparison = zoo.compare(
    ...         members[:8], (), ood="none", draws={"custom_draws": members[8:12]}, out=out, permutations=19, workers=1
    ...     )
    >>> comparison["custom_draws", "members"]["mmd"].p > 0.05
    True
    """
    return prepare_comparison(
        collection, methods, data, ood, out=out, reference=reference, draws=draws, recipe=recipe, runs=runs,
        per_run=per_run, permutations=permutations, search=search, workers=workers, device=device, seed=seed, say=say,
    ).run()  # fmt: skip

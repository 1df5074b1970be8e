"""Networks of transformers, built from the config.json of a model repo: by its own classes, never by code of a repo."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from checkpoints_zoo.errors import UsageError, explain_missing_packages
from checkpoints_zoo.formats.text import did_you_mean

# Errors that a class of transformers may raise for values that do not fit; not those for too little memory.
_BUILD_ERRORS = (TypeError, ValueError, AttributeError, KeyError, ImportError, AssertionError, ZeroDivisionError)
LARGEST_LAYER_COUNT = 10_000
LARGEST_COUNT = 2**31  # Largest whole number in a config: no layer or size is larger.


def build_from_config(class_name: str, /, **config: Any) -> nn.Module:
    """Build a network of transformers, and return the module with its random initial parameters.

    Args:
        class_name: name of a model class of transformers, as config.json has it ("GPTNeoXForCausalLM").
        config: values of config.json.

    Raises:
        MissingPackage: transformers is not installed.
        UsageError: transformers has no such class, or the class can't be built from these values.
    """
    with explain_missing_packages(f"architecture transformers/{class_name}"):
        import transformers
        from huggingface_hub.errors import StrictDataclassError
        from transformers.models.auto import modeling_auto
    subject = f"architecture transformers/{class_name}"
    known_classes = _model_classes(modeling_auto)
    if class_name not in known_classes:
        raise UsageError(
            subject, expected=f"a model class of transformers {transformers.__version__}", found="none of that name",
            do=did_you_mean(class_name, sorted(known_classes)) or "Code of a repo is never run: give architecture=",
        )  # fmt: skip
    model_type = str(config.get("model_type"))
    if model_type not in transformers.CONFIG_MAPPING:
        raise UsageError(
            subject, expected=f"a model_type of transformers {transformers.__version__}", found=repr(model_type)[:80]
        )
    values = _without_loading({k: v for k, v in config.items() if k not in ("model_type", "architectures")})
    if (largest := _largest_number(values)) > LARGEST_COUNT:
        raise UsageError(subject, expected="sizes in its config.json", found=f"{largest:,}")
    if (layers := _largest_number({k: v for k, v in values.items() if "layer" in k})) > LARGEST_LAYER_COUNT:
        raise UsageError(subject, expected=f"at most {LARGEST_LAYER_COUNT:,} layers", found=f"{layers:,}")
    model_class = getattr(transformers, class_name)
    try:
        settings = transformers.AutoConfig.for_model(model_type, **values)
        if not isinstance(settings, model_class.config_class):
            raise TypeError(f"a config of {model_type}, not of {class_name}")
        settings.use_cache = False
        for part in (settings, *vars(settings).values()):  # Backbones would fetch weights of their own.
            if getattr(part, "use_pretrained_backbone", False):
                part.use_pretrained_backbone = False
        module: nn.Module = model_class(settings)
    except (*_BUILD_ERRORS, StrictDataclassError) as error:
        raise UsageError(subject, expected="a config.json that it can be built from", found=str(error)[:300]) from error
    return module


def add_stored_names(module: nn.Module, stored_names: Iterable[str]) -> nn.Module:
    """Give tensors of a network the names that they have in a checkpoint too, where this version of transformers gives
    them other names; return the network.

    Args:
        module: a network of transformers.
        stored_names: names of the checkpoint's tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    own: Any = module
    tensors = module.state_dict(keep_vars=True)
    renamings = [change for change in get_model_conversion_mapping(own) if isinstance(change, WeightRenaming)]
    for stored_name in stored_names:
        if stored_name in tensors:
            continue
        name, _ = rename_source_key(stored_name, renamings, [], own.base_model_prefix, tensors)
        if name in tensors:
            *path, last = stored_name.split(".")
            parent = module
            for part in path:
                if getattr(parent, part, None) is None:
                    parent.add_module(part, nn.Module())
                parent = getattr(parent, part)
            tensor = tensors[name]
            if isinstance(tensor, nn.Parameter):
                parent.register_parameter(last, tensor)
            else:
                parent.register_buffer(last, tensor)
    return module


def _without_loading(values: Any) -> Any:
    """Return the values of a config.json without those that would load code: kernels, and classes of the repo."""
    if isinstance(values, dict):
        return {
            key: _without_loading(value)
            for key, value in values.items()
            if not str(key).startswith("_") and not str(key).endswith("implementation") and key != "auto_map"
        }
    return values


def _model_classes(modeling_auto: Any) -> set[str]:
    """Return the names of transformers' model classes, by its own tables of architectures."""
    names = set[str]()
    for table_name, table in vars(modeling_auto).items():
        if table_name.startswith("MODEL_") and table_name.endswith("_NAMES"):
            for value in table.values():
                names |= {value} if isinstance(value, str) else set(value)
    return names


def _largest_number(values: Any) -> int:
    """Return the largest whole number among JSON values, at least 0."""
    if isinstance(values, dict | list):
        inner = values.values() if isinstance(values, dict) else values
        return max((_largest_number(value) for value in inner), default=0)
    return abs(values) if type(values) is int else 0

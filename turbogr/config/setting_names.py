"""Names of settings, as `--set` takes them: which exist, and which one was probably meant.

People write `epochs` for `train.epochs` and `learning_rate` for `optimizer.lr`. A suggestion is a complete key.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

from turbogr.config.schema import Config
from turbogr.errors import nearest_names

_OTHER_NAMES = {
    "data.batch_size": "batch batchsize bs",
    "evaluate.ks": "k topk cutoffs",
    "evaluate.patience": "early_stopping early_stop",
    "loss.num_negatives": "negatives num_neg n_neg neg n_negatives negative_samples num_samples",
    "loss.temperature": "tau",
    "model.dim": "hidden_size hidden_dim hidden embedding_dim embedding_size emb_dim emb_size d_model width",
    "model.dropout": "dropout_rate dropout_prob",
    "model.max_len": "max_length maxlen max_seq_len max_sequence_length seq_len sequence_length history_length",
    "model.name": "model model_name architecture arch block",
    "model.num_blocks": "layers num_layers n_layers blocks n_blocks",
    "model.num_heads": "heads n_heads attention_heads",
    "optimizer.clip_norm": "clip grad_clip gradient_clipping max_grad_norm",
    "optimizer.lr": "learning_rate",
    "optimizer.schedule": "scheduler lr_schedule lr_scheduler",
    "optimizer.table_lr": "embedding_lr",
    "optimizer.warmup_steps": "warmup",
    "optimizer.weight_decay": "l2",
    "train.device": "gpu cuda accelerator",
    "train.epochs": "num_epochs n_epochs max_epochs",
    "train.seed": "random_seed random_state",
    "train.steps": "max_steps num_steps iterations",
    "train.threads": "num_threads cpus cores",
}
"""What other programs call a setting."""


def section_keys(section: str) -> list[str]:
    """Return the keys of a section; [] if it has none of its own, such as `tables`, whose names are the user's."""
    hint = typing.get_type_hints(Config).get(section)
    return [field.name for field in dataclasses.fields(typing.cast(Any, hint))] if _is_section(hint) else []


def all_settings() -> list[str]:
    """Return every key of the built-in sections, such as `train.epochs`."""
    return [f"{field.name}.{key}" for field in dataclasses.fields(Config) for key in section_keys(field.name)]


def is_setting(keys: Sequence[str]) -> bool:
    """Whether `section.key`, in its parts, is a setting; sections of plug-ins are not known here."""
    hint: Any = Config
    for key in keys:
        if _is_section(hint):
            names = [field.name for field in dataclasses.fields(hint) if not field.metadata.get("derived")]
            if key not in names:
                return False
            hint = typing.get_type_hints(hint)[key]
        elif typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        else:
            return False
    return True


def meant_settings(name: str, section: str | None = None) -> list[str]:
    """Return the keys that `name`, given in `section` or nowhere, was probably meant to be; [] if none is near."""
    plain = name.strip("-").lower().replace("-", "_")
    settings = all_settings()
    same = [key for key in settings if key.partition(".")[2] == plain]
    if same:
        return same
    other = [key for key, names in _OTHER_NAMES.items() if plain in names.split()]
    if other:
        return other
    if section in section_keys_by_name():
        near = nearest_names(plain, section_keys(str(section)))
        if near:
            return [f"{section}.{key}" for key in near]
    near = nearest_names(plain, list(dict.fromkeys(key.partition(".")[2] for key in settings)))[:1]
    return [key for key in settings if key.partition(".")[2] in near]


def section_keys_by_name() -> dict[str, list[str]]:
    """Return the keys of every built-in section by its name."""
    return {field.name: keys for field in dataclasses.fields(Config) if (keys := section_keys(field.name))}


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)

"""Sources of models: a folder, the hub, or S3. Each becomes a folder on this host; files are fetched once.

/models/llama        that folder; where it has no config.json, the GGUF file in it
/models/llama.gguf   a folder that stands for it (engine/gguf/folder.py); needs splitserve[gguf]
Qwen/Qwen3-0.6B      the hub, by huggingface_hub with all its settings (HF_HOME, HF_TOKEN, HF_ENDPOINT); its
                     cache is used where the hub cannot be reached
s3://bucket/prefix   an object store, by boto3 with all its settings (AWS_PROFILE, AWS_ENDPOINT_URL); needs
                     splitserve[s3]
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from ..coordinator.settings import HUB_ID, CoordinatorSettings
from ..coordinator.text.tiktoken_file import write_tokenizer
from ..engine.errors import ModelConfigError
from .config import ConfigError
from .extras import missing_for
from .model_cache import alone, cache_folder, replacing

TEXTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.*",
)
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
"""What is fetched: never pickled weights, and none for a coordinator."""
# a Path has lost one slash
S3 = re.compile(r"s3:/{1,2}(?P<bucket>[a-z0-9][a-z0-9.-]{1,62})(?:/(?P<prefix>.*?))?/*")
MOST_OBJECTS = 10_000
_log = logging.getLogger(__name__)
Settings = TypeVar("Settings", bound=BaseModel)
Coordinator = TypeVar("Coordinator", bound=CoordinatorSettings)


def with_folder(settings: Settings, *, weights: bool = True) -> Settings:
    """Settings whose ``model`` is a folder on this host, fetched where it was not; the served name stays.
    Raises ConfigError."""
    model, revision = getattr(settings, "model", None), getattr(settings, "revision", "")
    if model is None:
        return settings
    folder = resolved(str(model), revision, weights=weights)
    if folder == model:
        return settings
    changes: dict[str, Any] = {"model": folder, "revision": ""}
    if getattr(settings, "served_model_name", None) == "":
        name = str(model) if HUB_ID.fullmatch(str(model)) else Path(str(model)).name
        changes["served_model_name"] = name.removesuffix(".gguf")
    return settings.model_copy(update=changes)


def with_folders(settings: Coordinator, *, weights: bool) -> Coordinator:
    """The same for all models of a coordinator."""
    others = tuple(with_folder(other, weights=weights) for other in settings.other_models)
    return with_folder(settings.model_copy(update={"other_models": others}), weights=weights)


def resolved(model: str, revision: str = "", *, weights: bool = True) -> Path:
    """The folder that ``model`` names, or is fetched into. Raises ConfigError with what to do."""
    folder = _folder_of(model, revision, weights)
    try:
        write_tokenizer(folder)
    except ValueError as error:
        raise ConfigError(f"--model {model}: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"--model {model}: cannot write the tokenizer.json that is made of its tiktoken.model "
            f"({error.strerror}); start it once where {folder} can be written to"
        ) from error
    return folder


def _folder_of(model: str, revision: str, weights: bool) -> Path:
    wanted = TEXTS + WEIGHTS if weights else TEXTS
    if found := S3.fullmatch(model):
        if revision:
            raise ConfigError(f"--revision {revision}: {model} has none; it is for models of the hub")
        return _from_s3(found["bucket"], found["prefix"] or "", wanted)
    scheme, is_url, rest = model.partition(":/")
    if is_url and not Path(model).exists():
        raise ConfigError(
            f"--model {scheme}://{rest.lstrip('/')}: of URLs only s3://BUCKET/PREFIX is taken, BUCKET of 3 "
            "to 63 small letters, digits, dots and dashes; a model of the hub is ORG/NAME"
        )
    file = _gguf_file(Path(model))
    if file or Path(model).is_dir() or not HUB_ID.fullmatch(model):
        if revision:
            raise ConfigError(
                f"--revision {revision}: {model} is a {'file' if file else 'folder'}; it is for models of "
                "the hub, such as Qwen/Qwen3-0.6B"
            )
        return _from_gguf(file) if file else Path(model)
    return _from_hub(model, revision or "main", wanted)


def _from_hub(model: str, revision: str, wanted: tuple[str, ...]) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download, try_to_load_from_cache
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--model: there is no folder {model}, and to fetch it from the hub needs "
            f"{error.name}: pip install huggingface_hub"
        ) from error
    if not sys.stderr.isatty():
        disable_progress_bars()
    _log.info("looking for %s (%s) on the hub", model, revision)
    try:
        return Path(str(snapshot_download(model, revision=revision, allow_patterns=list(wanted))))
    except errors.GatedRepoError as error:
        reason = "it is gated: accept its licence on the hub, then set HF_TOKEN to a token of that account"
        failure: Exception = error
    except errors.RevisionNotFoundError as error:
        reason, failure = f"it has no revision {revision}; --revision is a branch, a tag or a commit", error
    except errors.RepositoryNotFoundError as error:
        reason, failure = (
            "there is neither such a folder nor such a model on the hub (or it is private: set HF_TOKEN)",
            error,
        )
    except Exception as error:  # of several libraries below it
        reason = f"the hub cannot be reached ({_first_line(error)})"
        failure = error
        cached = try_to_load_from_cache(model, "config.json", revision=revision)
        if isinstance(cached, str):  # perhaps only a part of it: the folder is checked later
            _log.warning("%s, using what is cached of %s", reason, model)
            return Path(cached).parent
        home = os.environ.get("HF_HOME", "~/.cache/huggingface")
        reason += (
            f", and {home} has no copy; run `hf download {model}` where there is a network, then copy "
            "its folder; "
        )
        reason += "or set HF_ENDPOINT to a mirror"
    raise ConfigError(f"--model {model}: {reason}") from failure


def _from_s3(bucket: str, prefix: str, wanted: tuple[str, ...]) -> Path:
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--model s3://{bucket}: this needs {error.name}, which is not installed: pip install "
            "'splitserve[s3]'"
        ) from error
    address = f"s3://{bucket}/{prefix}"
    try:
        client = boto3.client("s3")
        objects = dict(_wanted_objects(client, bucket, prefix, wanted))
        if not objects:
            raise ConfigError(
                f"--model {address}: there is no config.json, tokenizer.json or *.safetensors "
                "under it; name their folder"
            )
        return _fetched(client, bucket, address, objects)
    except (BotoCoreError, ClientError) as error:
        advice = (
            "check the name, AWS_PROFILE or AWS_ACCESS_KEY_ID, AWS_REGION, and AWS_ENDPOINT_URL for "
            "another store"
        )
        raise ConfigError(f"--model {address}: {_first_line(error)}; {advice}") from error
    except OSError as error:
        raise ConfigError(
            f"--model {address}: cannot write it to {cache_folder()} ({error.strerror}); make room "
            "or set XDG_CACHE_HOME"
        ) from error


@dataclass(frozen=True, slots=True)
class _Object:
    key: str
    etag: str
    size: int


def _wanted_objects(
    client: Any, bucket: str, prefix: str, wanted: tuple[str, ...]
) -> Iterator[tuple[str, _Object]]:
    """File name and object of those right under ``prefix``."""
    under = f"{prefix}/" if prefix else ""
    listing = {"Bucket": bucket, "Prefix": under, "Delimiter": "/"}
    pages = client.get_paginator("list_objects_v2").paginate(
        **listing, PaginationConfig={"MaxItems": MOST_OBJECTS}
    )
    for page in pages:
        for entry in page.get("Contents", []):
            name = entry["Key"].removeprefix(under)
            if "/" not in name and any(fnmatch(name, pattern) for pattern in wanted):
                yield name, _Object(entry["Key"], entry["ETag"], entry["Size"])


def _fetched(client: Any, bucket: str, address: str, objects: Mapping[str, _Object]) -> Path:
    """Return a folder of exactly these objects, named by their digests: a complete one never changes."""
    named = "\n".join(f"{name} {one.etag} {one.size}" for name, one in sorted(objects.items()))
    folder = cache_folder() / hashlib.sha256(f"{address}\n{named}".encode()).hexdigest()[:32]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        if folder.is_dir():
            return folder
        needed, free = sum(one.size for one in objects.values()), shutil.disk_usage(folder.parent).free
        if needed > free:
            raise ConfigError(
                f"--model {address} has {needed / 1e9:.1f} GB, {folder.parent} has "
                f"{free / 1e9:.1f} free; make room or set XDG_CACHE_HOME"
            )
        _log.info("fetching %s: %d files, %.1f MB", address, len(objects), needed / 1e6)
        with replacing(folder) as part:
            for name, one in objects.items():
                client.download_file(bucket, one.key, str(part / name))
    return folder


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that ``path`` is, or the only one in a folder without config.json; None where it is
    something else. Raises ConfigError."""
    if path.suffix == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise ConfigError(f"--model {path}: there is no such file")
        return path
    found = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise ConfigError(
            f"--model {path}: it has {len(found)} GGUF files ({found[0].name}, {found[1].name}...); name one"
        )
    return found[0] if found else None


def _from_gguf(file: Path) -> Path:
    """Return the folder that stands for this file; one is written where the file is new or has changed."""
    if advice := missing_for("gguf"):
        raise ConfigError(f"--model {file}: {advice}")
    from ..engine.gguf.folder import BESIDE, FORMAT, write_folder
    from ..engine.model.gguf_types import WEIGHTS

    parts = [file.resolve(), *(beside for name in BESIDE if (beside := file.parent / name).is_file())]
    stats = [(str(part), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    stem = f"{file.stem}-{FORMAT}-"  # an older build that runs keeps its folder
    folder = cache_folder("gguf") / (stem + hashlib.sha256(repr(stats).encode()).hexdigest()[:16])
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder):
            if not folder.is_dir():
                _log.info("reading the metadata of %s", file)
                with replacing(folder) as part:
                    write_folder(file, part)
                for old in folder.parent.glob(f"{escape(stem)}*/{WEIGHTS}"):
                    if old.parent != folder and old.readlink() == file.resolve():
                        shutil.rmtree(old.parent, ignore_errors=True)
    except ModelConfigError as error:
        raise ConfigError(f"--model {error}") from error
    except OSError as error:
        raise ConfigError(
            f"--model {file}: cannot write what stands for it to {folder.parent} ({error.strerror}); make "
            "room or set XDG_CACHE_HOME"
        ) from error
    return folder


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

"""Adapter versions as PEFT folders, immutable and complete or absent."""

from __future__ import annotations

import re
from collections.abc import Mapping

from storage.errors import InvalidName, ObjectExists, ObjectNotFound
from storage.layout import JobLayout
from storage.objects import ObjectStore

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_OPTIONAL = {"README.md"}
_CONFIG = re.compile(rf"v(0|[1-9]\d*)/{re.escape(CONFIG_FILE)}")


def write_adapter(store: ObjectStore, layout: JobLayout, n: int, files: Mapping[str, bytes]) -> None:
    """Writes version `n`: adapter_model.safetensors, adapter_config.json and maybe README.md, by name.

    The configuration goes last: a version exists when it does, so a killed writer leaves none. Writing the same
    bytes again does nothing or completes the version. Raises ObjectExists for other bytes, InvalidName for other files.
    """
    required = {WEIGHTS_FILE, CONFIG_FILE}
    if not required <= set(files) <= required | _OPTIONAL:
        raise InvalidName(f"adapter files {sorted(files)}: {sorted(required)} are needed, {sorted(_OPTIONAL)} allowed")
    for name in sorted(files, key=lambda name: name == CONFIG_FILE):
        key = f"{layout.adapter(n)}/{name}"
        try:
            store.create(key, files[name])
        except ObjectExists:
            if store.get(key) != files[name]:
                raise ObjectExists(
                    f"adapter {layout.adapter_name(n)} is immutable: {store.url(key)} has other bytes"
                ) from None


def read_adapter(store: ObjectStore, layout: JobLayout, n: int) -> dict[str, bytes]:
    """The files of version `n` by name. Raises ObjectNotFound if the version is absent or incomplete."""
    folder = layout.adapter(n)
    if not store.exists(f"{folder}/{CONFIG_FILE}"):
        raise ObjectNotFound(f"adapter {layout.adapter_name(n)} does not exist: no {store.url(folder)}/{CONFIG_FILE}")
    return {key.removeprefix(f"{folder}/"): store.get(key) for key in store.list(folder)}


def list_adapters(store: ObjectStore, layout: JobLayout) -> list[int]:
    """The complete versions of a job, ascending."""
    names = (key.removeprefix(f"{layout.adapters}/") for key in store.list(layout.adapters))
    return sorted(int(match[1]) for match in map(_CONFIG.fullmatch, names) if match)


def delete_adapter(store: ObjectStore, layout: JobLayout, n: int) -> None:
    """Deletes version `n`, its configuration first, so that an interrupted deletion leaves no half version."""
    store.delete(f"{layout.adapter(n)}/{CONFIG_FILE}")
    store.delete(layout.adapter(n))

"""Fleet files: YAML in, a checked FleetSpec out, or one readable line for each problem.

A `FleetSpec` from `load_fleet` is one that can be started.
"""

from __future__ import annotations

import re
import types
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import ValidationError

from marlaas.errors import SpecError
from marlaas.specs import (
    VERSIONS_A_JOB,
    CustomSpec,
    DatasetSpec,
    FleetSpec,
    FunctionToolSpec,
    LookupToolSpec,
    StoreSpec,
    ToolsSpec,
)

_SECRETS = ("services.database", "store.options")  # their values are never shown
_WORDING = (
    (r"^Input should be a valid dictionary( or .+)?$", "must be a mapping"),
    (r"^Input should be a valid tuple$", "must be a list"),
    (r"^(Input|String|List|Tuple) should ", "must "),
    (r" after validation, not ", ", not "),
)


def load_fleet(path: Path) -> FleetSpec:
    """Reads and checks a fleet file. Raises SpecError with every problem found; starts nothing."""
    source = str(path)
    fleet = parse_fleet(_read_yaml(path), source)
    problems = [*_pool_problems(fleet), *_store_problems(fleet.store), *_environment_problems(fleet, path.parent)]
    if problems:
        raise SpecError(source, problems)
    return _anchored(fleet, path.parent.resolve())


def _anchored(fleet: FleetSpec, folder: Path) -> FleetSpec:
    """Makes paths absolute, so that a flow reads the same fleet in any working directory.

    Data and code lie beside the fleet file; the store and the services' state where the command is run.
    """

    tenants = tuple(t.model_copy(update={"environment": _beside(t.environment, folder)}) for t in fleet.tenants)
    services = fleet.services.model_copy(update={"state": fleet.services.state.expanduser().absolute()})
    store = fleet.store
    if "://" not in store.url:
        store = store.model_copy(update={"url": str(Path(store.url).expanduser().absolute())})
    return fleet.model_copy(update={"tenants": tenants, "services": services, "store": store})


def _beside(spec: Any, folder: Path) -> Any:
    """An environment or a tool with absolute paths."""
    if isinstance(spec, ToolsSpec):
        tools = tuple(_beside(tool, folder) for tool in spec.tools)
        return spec.model_copy(update={"questions": _beside(spec.questions, folder), "tools": tools})
    if isinstance(spec, DatasetSpec | LookupToolSpec) and "://" not in spec.path:
        return spec.model_copy(update={"path": str(folder / Path(spec.path).expanduser())})
    if isinstance(spec, CustomSpec | FunctionToolSpec):
        return spec.model_copy(update={"path": folder / (spec.path or "")})
    return spec


def parse_fleet(document: Any, source: str = "fleet") -> FleetSpec:
    """Builds a FleetSpec from plain data; `defaults` are laid under each tenant. Raises SpecError."""
    if not isinstance(document, dict):
        raise SpecError(source, [f"must be a mapping with name, model and tenants, not {_shown(document)}"])
    document = dict(document)
    defaults = document.pop("defaults", {})
    tenants = document.get("tenants")
    if not isinstance(defaults, dict):
        raise SpecError(source, [f"defaults: {_shown(defaults)} must be a mapping of tenant fields"])
    if isinstance(tenants, list):
        document["tenants"] = [_overlay(defaults, t) if isinstance(t, dict) else t for t in tenants]
    try:
        return FleetSpec.model_validate(document)
    except ValidationError as error:
        found = error.errors()
        raise SpecError(source, [_problem(e) for e in found if not _follows(e, found)]) from None


def _follows(error: Any, found: list[Any]) -> bool:
    """Whether a list only counts as too short because its items have problems of their own."""
    loc = error["loc"]
    return error["type"] == "too_short" and any(e["loc"][: len(loc)] == loc for e in found if e is not error)


def _overlay(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`, field by field; an environment of another kind takes nothing from the one below."""
    if "kind" in over and "kind" in under and over["kind"] != under["kind"]:
        return over
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _overlay(merged[key], value) if both else value
    return merged


def _problem(error: Any) -> str:
    """One line for one pydantic error: field, value given, what is allowed."""
    field, kind, given = _field_path(error["loc"]), error["type"], error["input"]
    message = error["msg"].removeprefix("Value error, ")
    for said, ours in _WORDING:
        message = re.sub(said, ours, message)
    if kind == "extra_forbidden":
        return f"{field}: unknown key; allowed are {', '.join(_owner(error['loc'][:-1]).model_fields)}"
    if kind == "missing":
        return f"{field}: is required"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        allowed = f"must be one of {', '.join(_members(_owner(error['loc'])))}"
        at = f"{field}.kind"
        return f"{at}: {_shown(given['kind'])} is not allowed: {allowed}" if "kind" in given else f"{at}: {allowed}"
    if kind == "value_error" and isinstance(given, dict):
        return f"{field}.{message}".removeprefix("fleet.")
    if field in _SECRETS:
        return f"{field}: is not allowed: {message}"
    return f"{field}: {_shown(given)} is not allowed: {message}"


def _field_path(loc: tuple[int | str, ...]) -> str:
    # pydantic puts the kind of a spec with kinds between the field and what is in it.
    parts = [part for at, part in enumerate(loc) if part not in _members(_owner(loc[:at]))]
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".") or "fleet"


def _owner(loc: tuple[int | str, ...]) -> Any:
    """The annotation of what lies at a pydantic location; None where the specs end."""
    owner: Any = FleetSpec
    for part in loc:
        owner = _plain(owner)
        if isinstance(part, int):
            owner = next(iter(get_args(owner)), None)
        elif part in _members(owner):
            owner = _members(owner)[part]
        else:
            fields = getattr(owner, "model_fields", {})
            owner = fields[part].annotation if part in fields else None
    return _plain(owner)


def _plain(annotation: Any) -> Any:
    """An annotation without Annotated and without `| None`."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        some = [each for each in get_args(annotation) if each is not type(None)]
        return _plain(some[0]) if len(some) == 1 else annotation
    return annotation


def _members(annotation: Any) -> dict[Any, Any]:
    """The specs that a union tells apart by `kind`, by their kinds; none for any other annotation."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return {}
    specs = [each for each in get_args(annotation) if "kind" in getattr(each, "model_fields", {})]
    return {kind: each for each in specs for kind in get_args(each.model_fields["kind"].annotation)}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _pool_problems(fleet: FleetSpec) -> list[str]:
    pool, problems = fleet.pool, []
    if pool.train_tokens < pool.max_sequence_tokens:
        problems.append(
            f"pool.train_tokens: {pool.train_tokens} must be at least "
            f"pool.max_sequence_tokens {pool.max_sequence_tokens}"
        )
    seen: dict[str, int] = {}
    for i, tenant in enumerate(fleet.tenants):
        at = f"tenants[{i}]"
        if tenant.name in seen:
            problems.append(
                f"{at}.name: {tenant.name!r} is used by tenants[{seen[tenant.name]}]; names must be distinct"
            )
        seen.setdefault(tenant.name, i)
        if tenant.lora.rank > pool.max_rank:
            problems.append(f"{at}.lora.rank: {tenant.lora.rank} must be at most pool.max_rank {pool.max_rank}")
        for part, longest in (("sampling", tenant.sampling.max_tokens), ("evaluation", tenant.evaluation.max_tokens)):
            if longest is not None and longest >= pool.max_sequence_tokens:
                problems.append(
                    f"{at}.{part}.max_tokens: {longest} must leave room for a prompt in "
                    f"pool.max_sequence_tokens {pool.max_sequence_tokens}"
                )
        cap = tenant.quota.max_sequences
        if cap is not None and cap > pool.max_sequences:
            problems.append(f"{at}.quota.max_sequences: {cap} must be at most pool.max_sequences {pool.max_sequences}")
    versions = sum(t.max_staleness + 2 for t in fleet.tenants)
    if versions > VERSIONS_A_JOB * pool.max_adapters:
        problems.append(
            f"pool.max_adapters: {pool.max_adapters} leave room for {VERSIONS_A_JOB * pool.max_adapters} resident "
            f"versions; these tenants' max_staleness needs {versions}"
        )
    if len(fleet.tenants) > pool.max_adapters:
        problems.append(f"tenants: {len(fleet.tenants)} tenants do not fit in pool.max_adapters {pool.max_adapters}")
    return problems


def _store_problems(store: StoreSpec) -> list[str]:
    """A folder needs no look, and spares the import of everything S3 needs."""
    if not store.options and "://" not in store.url:
        return []
    from storage import InvalidName

    try:
        store.open()
    except InvalidName as error:
        return [f"store: {error}"]
    except SpecError as error:
        return error.problems
    return []


def _environment_problems(fleet: FleetSpec, folder: Path) -> list[str]:
    from marlaas.environments import check_environment

    problems = []
    for i, tenant in enumerate(fleet.tenants):
        problem = check_environment(tenant.environment, folder)
        if problem:
            problems.append(f"tenants[{i}].environment.{problem}")
    return problems


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML without the silent rule that the last of two equal keys wins."""


def _construct_unique(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} cannot be a key", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)  # only now: a key may be given again over one that `<<` merges in
    return loader.construct_mapping(node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_unique)


def _read_yaml(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(str(path), [f"cannot be read: {error}"]) from None
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SpecError(str(path), [f"{where}is not valid YAML: {getattr(error, 'problem', None) or error}"]) from None

"""PostgreSQL URLs (display, drivers, passwords) and the databases that Prefect and MLflow need."""

from __future__ import annotations

from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import psycopg2
from psycopg2 import errors

from marlaas.services.processes import ServiceError

DATABASES = {"prefect": "asyncpg", "mlflow": "psycopg2"}
_CONNECT_SECONDS = 5


def display_url(url: str) -> str:
    """The URL without its password, wherever that stands."""
    parts = urlsplit(url)
    login, at, host = parts.netloc.rpartition("@")
    options = [(key, value) for key, value in parse_qsl(parts.query) if key != "password"]
    return parts._replace(
        netloc=login.partition(":")[0] + at + host, query=urlencode(options, safe="/", quote_via=quote)
    ).geturl()


def redact(text: str, url: str) -> str:
    """`text` with the URL's password blotted out, as given and percent-decoded."""
    parts = urlsplit(url)
    passwords = {parts.password, dict(parse_qsl(parts.query)).get("password")}
    for password in filter(None, passwords):
        text = text.replace(password, "***").replace(unquote(password), "***")
    return text


def driver_url(url: str, name: str) -> str:
    """The SQLAlchemy URL of database `name` for the server that uses it, with that driver's option names."""
    parts = urlsplit(url)
    options = parse_qsl(parts.query)
    if DATABASES[name] == "asyncpg":
        options = [("ssl" if key == "sslmode" else key, value) for key, value in options]
    query = urlencode(options)
    return parts._replace(scheme=f"postgresql+{DATABASES[name]}", path=f"/{name}", query=query).geturl()


def answers(url: str) -> bool:
    """Whether a connection succeeds."""
    try:
        _connect(url).close()
    except psycopg2.Error:
        return False
    return True


def ensure_databases(url: str, names: list[str]) -> None:
    """Create the missing ones among `names`.

    Raises:
        ServiceError: the server cannot be reached, or refuses to create a database that is missing.
    """
    shown = display_url(url)
    try:
        connection = _connect(url)
    except psycopg2.Error as error:
        raise ServiceError(f"services.database: cannot connect to {shown}: {_reason(error, url)}") from None
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT datname FROM pg_database")
            present = {row[0] for row in cursor.fetchall()}
        for name in names:
            if name not in present:
                _create(connection, name, url)
    finally:
        connection.close()


def _create(connection: psycopg2.extensions.connection, name: str, url: str) -> None:
    try:
        with connection.cursor() as cursor:
            cursor.execute(f'CREATE DATABASE "{name}"')
    except (errors.DuplicateDatabase, errors.UniqueViolation):
        return  # another start was faster
    except psycopg2.Error as error:
        raise ServiceError(
            f"services.database: database {name!r} is missing on {display_url(url)} and cannot be created: "
            f"{_reason(error, url)}. Run there: CREATE DATABASE {name}; or give a user who may."
        ) from None


def _connect(url: str) -> psycopg2.extensions.connection:
    parts = urlsplit(url)
    path = parts.path if parts.path.strip("/") else "/postgres"
    return psycopg2.connect(parts._replace(path=path).geturl(), connect_timeout=_CONNECT_SECONDS)


def _reason(error: psycopg2.Error, url: str) -> str:
    return redact(str(error).strip(), url)

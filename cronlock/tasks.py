"""A task: a named function with its options, and the registry of them."""

import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from pydantic import BaseModel, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from cronlock.config import Settings
from cronlock.errors import ConfigError, PayloadInvalid, RegistrationError, UnknownTask
from cronlock.keys import Key
from cronlock.schedule import Schedule
from cronlock.units import LONGEST_TIMEOUT, parse_duration

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}", re.ASCII)
INT64 = range(-(2**63), 2**63)
MODES = ("transaction", "guard", "queue")
MOST_SLOTS = 100
MOST_PRIORITY = 1000
MOST_ATTEMPTS = 10_000
SEPARATOR = "\x1f"
"""Between the parts of what is hashed for a key or an occurrence."""
SkipStatus = Literal[200, 409, 503]
Dedupe = str | Sequence[str] | Callable[[Any], Any]
"""How the idempotency key of a job is found where none is given; see `Cronlock.task`."""


@dataclass(frozen=True, slots=True)
class Lock:
    """What a task locks: a name that PostgreSQL hashes, or a number that is used as it is."""

    name: str | None
    number: int | None = None

    def __str__(self) -> str:
        return repr(self.name) if self.number is None else str(self.number)


@dataclass(frozen=True)
class Task:
    """A registered function and how it is to be run."""

    name: str
    function: Callable[..., Any]
    lock: Lock
    timeout: timedelta | None
    acquire_timeout: timedelta
    skip_status: SkipStatus
    schedule: str | None
    timezone: str
    is_async: bool
    payload_type: TypeAdapter[Any] | None = None
    takes_payload: bool = False
    mode: str = "transaction"
    key: Key | None = None
    max_concurrent: int = 1
    min_interval: timedelta | None = None
    namespace: str = ""
    queue: str = "default"
    priority: int = 0
    max_attempts: int = 5
    retry_delay: timedelta = timedelta(seconds=1)
    retry_cap: timedelta = timedelta(hours=1)
    retry_on: tuple[type[BaseException], ...] | None = None
    dedupe: Dedupe | None = None
    idempotency_ttl: timedelta = timedelta(hours=1)

    @property
    def full_name(self) -> str:
        """The name with the namespace before it, as lock names have it."""
        return f"{self.namespace}:{self.name}" if self.namespace else self.name

    @functools.cached_property
    def is_guarded(self) -> bool:
        """Whether the lock has a transaction of its own, and the task opens its own."""
        return self.mode == "guard"

    @functools.cached_property
    def is_queued(self) -> bool:
        """Whether a call of its URL makes a job, which a worker runs; in a worker it has a transaction."""
        return self.mode == "queue"

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether its runs share one lock and nothing else decides which of them may run."""
        return self.key is None and self.max_concurrent == 1 and self.min_interval is None and not self.is_guarded

    @property
    def required_fields(self) -> list[str]:
        """The fields that a payload must have, by the task's model or, without one, by its key."""
        try:
            schema = {} if self.payload_type is None else self.payload_type.json_schema()
        except PydanticUserError:  # a type that JSON's schema has no word for
            schema = {}
        if "properties" in schema:
            return list(schema.get("required", ()))
        return list(self.key.fields) if self.key else []

    def validate(self, payload: dict[str, Any]) -> Any:
        """The payload as the task's annotated type, or as it is where there is none.

        Raises `PayloadInvalid` with the fields that are wrong.
        """
        if self.payload_type is None:
            return payload
        try:
            return self.payload_type.validate_python(payload)
        except ValidationError as error:
            raise PayloadInvalid(
                [
                    {
                        "field": ".".join(str(part) for part in problem["loc"]) or "payload",
                        "message": problem["msg"],
                        "type": problem["type"],
                    }
                    for problem in error.errors(include_url=False, include_context=False, include_input=False)
                ]
            ) from None

    def call(self, run: Any) -> Any:
        """Call the function for `run`; an async function gives back its coroutine."""
        return self.function(run, run.payload) if self.takes_payload else self.function(run)


class Registry:
    """The tasks of one `Cronlock`, by name."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks.values())

    def __len__(self) -> int:
        return len(self._tasks)

    def find(self, name: str) -> Task | None:
        """The task of exactly this name, or None."""
        return self._tasks.get(name)

    def get(self, name: str) -> Task:
        """The task of exactly this name; raises `UnknownTask` naming those there are."""
        if task := self._tasks.get(name):
            return task
        known = ", ".join(sorted(self._tasks)) or "none is registered"
        raise UnknownTask(f"there is no task {name!r}; known: {known}")

    def add(self, task: Task) -> None:
        """Register a task.

        Raises `RegistrationError` if its name is taken, or if a task of the same lock has other slots or another kind
        of key: they would not exclude each other.
        """
        if other := self._tasks.get(task.name):
            raise RegistrationError(
                f"the task {task.name!r} is registered twice: {where(other.function)} and {where(task.function)}"
            )
        for other in self._tasks.values():
            if other.lock == task.lock and (other.max_concurrent, other.key) != (task.max_concurrent, task.key):
                raise RegistrationError(
                    f"the tasks {other.name!r} and {task.name!r} have one lock ({task.lock}); they must have the same"
                    " max_concurrent and key, or each a lock of its own"
                )
        self._tasks[task.name] = task


def where(function: Callable[..., Any]) -> str:
    """module:line of a function, for messages."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def declare(
    function: Callable[..., Any],
    name: str,
    settings: Settings,
    *,
    lock: str | int | None,
    mode: str,
    key: str | None,
    max_concurrent: int,
    min_interval: str | float | timedelta | None,
    timeout: str | float | timedelta | None,
    acquire_timeout: str | float | timedelta | None,
    skip_status: int | None,
    schedule: str | None,
    timezone: str,
    queue: str = "default",
    priority: int = 0,
    max_attempts: int | None = None,
    retry_delay: str | float | timedelta = 1,
    retry_cap: str | float | timedelta = 3600,
    retry_on: Sequence[type[BaseException]] | type[BaseException] | None = None,
    dedupe: Dedupe | None = None,
    idempotency_ttl: str | float | timedelta | None = None,
) -> Task:
    """Check what the decorator was given and make the `Task`; raises `RegistrationError`."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RegistrationError(
            f"the task name {name!r} is not allowed: 1 to 40 of a-z 0-9 . _ - beginning with a letter or digit,"
            " such as 'sync-inventory'"
        )
    if name == "health" or name.startswith("cronlock."):
        raise RegistrationError(f"the task name {name!r} is reserved")
    if skip_status not in (None, 200, 409, 503):
        raise RegistrationError(f"task {name!r}: skip_status must be 200, 409 or 503, not {skip_status!r}")
    if mode not in MODES:
        raise RegistrationError(
            f"task {name!r}: mode must be {', '.join(map(repr, MODES[:-1]))} or {MODES[-1]!r}, not {mode!r}"
        )
    if isinstance(max_concurrent, bool) or not isinstance(max_concurrent, int) or not 1 <= max_concurrent <= MOST_SLOTS:
        raise RegistrationError(
            f"task {name!r}: max_concurrent must be a whole number from 1 to {MOST_SLOTS}, not {max_concurrent!r}"
        )
    if mode == "queue" and max_concurrent > 1:
        raise RegistrationError(
            f"task {name!r}: in queue mode its URL has one live job at a time, or one for each value of `key`;"
            " max_concurrent is for the other modes"
        )
    if isinstance(lock, int) and (max_concurrent > 1 or key is not None):
        raise RegistrationError(
            f"task {name!r}: a lock that is a number is one lock; give it a name to use max_concurrent or key"
        )
    if isinstance(lock, str) and SEPARATOR in lock and key is not None:
        raise RegistrationError(f"task {name!r}: a lock with a key must not have chr(31) in its name, which parts them")
    try:
        if schedule is not None:
            Schedule.parse(schedule, timezone)
        task_key = None if key is None else Key.parse(key)
        task_interval = (
            None if min_interval is None else span("min_interval", min_interval, settings.retention_completed)
        )
        usual = None if mode == "guard" else settings.timeout
        task_timeout = usual if timeout is None else span("timeout", timeout)
        task_acquire = settings.acquire_timeout if acquire_timeout is None else span("acquire_timeout", acquire_timeout)
        of_jobs = options_of_jobs(
            settings, queue, priority, max_attempts, retry_delay, retry_cap, retry_on, dedupe, idempotency_ttl
        )
    except (ConfigError, ValueError) as error:
        raise RegistrationError(f"task {name!r}: {error}") from None
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise RegistrationError(
            f"task {name!r}: {where(function)} is a generator, which nobody would run; remove `yield`"
        )
    takes_payload, annotation = payload_parameter(function, name)
    payload_type = None if annotation is None else adapter(name, annotation)
    if task_key is not None:
        refuse_unknown_fields(name, task_key, annotation)
    return Task(
        name=name,
        function=function,
        lock=task_lock(name, lock, settings.namespace),
        timeout=task_timeout,
        acquire_timeout=task_acquire,
        skip_status=skip_status or settings.skip_status,  # type: ignore[arg-type]  # checked above
        schedule=schedule,
        timezone=timezone,
        is_async=is_coroutine_function(function),
        payload_type=payload_type,
        takes_payload=takes_payload,
        mode=mode,
        key=task_key,
        max_concurrent=max_concurrent,
        min_interval=task_interval,
        namespace=settings.namespace,
        **of_jobs,
    )


def options_of_jobs(
    settings: Settings,
    queue: str,
    priority: int,
    max_attempts: int | None,
    retry_delay: str | float | timedelta,
    retry_cap: str | float | timedelta,
    retry_on: Sequence[type[BaseException]] | type[BaseException] | None,
    dedupe: Dedupe | None,
    idempotency_ttl: str | float | timedelta | None,
) -> dict[str, Any]:
    """The options of a task for its jobs, checked; raises ValueError naming the one that is wrong."""
    if dedupe is not None and dedupe != "payload" and not callable(dedupe):
        is_list = isinstance(dedupe, Sequence) and not isinstance(dedupe, str) and len(dedupe) > 0
        if not is_list or not all(isinstance(name, str) and name for name in dedupe):
            raise ValueError(f"dedupe must be 'payload', the names of fields, or a callable, not {dedupe!r}")
        dedupe = tuple(dedupe)
    kinds = None
    if retry_on is not None:
        given = retry_on if isinstance(retry_on, Sequence) else (retry_on,)
        if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in given):
            raise ValueError(f"retry_on must be exception types, not {retry_on!r}")
        kinds = tuple(given)
    most = settings.max_attempts if max_attempts is None else max_attempts
    return {
        "queue": queue_name(queue),
        "priority": whole("priority", priority, -MOST_PRIORITY, MOST_PRIORITY),
        "max_attempts": whole("max_attempts", most, 1, MOST_ATTEMPTS),
        "retry_delay": span("retry_delay", retry_delay),
        "retry_cap": span("retry_cap", retry_cap),
        "retry_on": kinds,
        "dedupe": dedupe,
        "idempotency_ttl": (
            settings.idempotency_ttl if idempotency_ttl is None else span("idempotency_ttl", idempotency_ttl)
        ),
    }


def whole(option: str, given: Any, least: int, most: int) -> int:
    """A whole number within bounds; raises ValueError with the name of the option."""
    if isinstance(given, bool) or not isinstance(given, int) or not least <= given <= most:
        raise ValueError(f"{option} must be a whole number from {least} to {most}, not {given!r}")
    return given


def queue_name(given: Any) -> str:
    """The name of a queue; raises ValueError for one that is not allowed."""
    if not isinstance(given, str) or not NAME.fullmatch(given):
        raise ValueError(f"queue must be 1 to 40 of a-z 0-9 . _ - beginning with a letter or digit, not {given!r}")
    return given


def span(option: str, given: str | float | timedelta, longest: timedelta = LONGEST_TIMEOUT) -> timedelta:
    """A duration that the decorator was given; raises ValueError with the name of the option."""
    try:
        return parse_duration(given, longest=longest)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def refuse_unknown_fields(task: str, key: Key, model: Any) -> None:
    """Raise `RegistrationError` if the key names a field that the task's model can never have."""
    if not (isinstance(model, type) and issubclass(model, BaseModel)) or model.model_config.get("extra") == "allow":
        return
    known = {*model.model_fields, *model.model_computed_fields}
    if unknown := [name for name in key.fields if name not in known]:
        raise RegistrationError(
            f"task {task!r}: key={key.template!r} names {', '.join(unknown)}, which {model.__name__} does not have;"
            f" it has {', '.join(sorted(known)) or 'none'}"
        )


def task_lock(task: str, lock: str | int | None, namespace: str) -> Lock:
    """The lock of a task: an int as it is, a name (the task's by default) with the namespace before it."""
    if isinstance(lock, int) and not isinstance(lock, bool):
        if lock not in INT64:
            raise RegistrationError(f"task {task!r}: lock={lock} does not fit PostgreSQL's bigint")
        return Lock(None, lock)
    name = task if lock is None else lock
    if not isinstance(name, str) or not name or "\0" in name or len(name) > 200:
        raise RegistrationError(f"task {task!r}: lock must be a name of 1 to 200 characters or an int, not {lock!r}")
    return Lock(f"{namespace}:{name}" if namespace else name)


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; sees through functools.partial and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the bound method's kind is what is asked
    )


def payload_parameter(function: Callable[..., Any], task: str) -> tuple[bool, Any]:
    """Whether the function takes a payload as its second argument, and what it is annotated with; None for anything."""
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        or (parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty)
    ]
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    if not parameters or len(required) > 2 or any(p.kind is p.KEYWORD_ONLY for p in required):
        raise RegistrationError(f"task {task!r}: {where(function)} must take (run) or (run, payload), in that order")
    if len(parameters) < 2:
        return False, None
    try:
        hints = typing.get_type_hints(inspect.unwrap(function), include_extras=True)
    except Exception as error:
        raise RegistrationError(f"task {task!r}: the annotations cannot be read: {error}") from error
    annotation = hints.get(parameters[1].name, dict[str, Any])
    return True, None if annotation is Any else annotation


def adapter(task: str, annotation: Any) -> TypeAdapter[Any]:
    """What validates a payload to `annotation`."""
    try:
        return TypeAdapter(annotation)
    except PydanticSchemaGenerationError as error:
        raise RegistrationError(
            f"task {task!r}: pydantic cannot validate a payload as {annotation!r}: {error.message}"
        ) from None

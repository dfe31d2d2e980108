"""How values travel between the two sandboxed processes.

Plain data is sent by value. Lists, dictionaries and other containers that can change are shared: each message says how
those that both processes use have changed, so that a program can sort a test's list in place. Everything else stays in
its process, and the other one gets a proxy (`remote`).
"""

import base64
import builtins
import importlib
import json
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from cory_env.sandbox.remote import (
    Connection,
    RemoteClass,
    RemoteObject,
    is_exception,
    is_remote,
    make_object,
    mirror_class,
    plain_base,
)

CONTAINERS: dict[str, Any] = {
    kind.__name__: kind for kind in (list, dict, set, bytearray, deque, Counter, OrderedDict, defaultdict)
}
BY_ARGUMENTS: dict[
    str, Callable[[Any], Any]
] = {  # other types that are sent by value: arguments that make an equal one
    "builtins.ellipsis": lambda _: (),
    "builtins.NotImplementedType": lambda _: (),
    "builtins.complex": lambda value: (value.real, value.imag),
    "builtins.bytes": lambda value: (value.hex(),),
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.slice": lambda value: (value.start, value.stop, value.step),
    "builtins.memoryview": lambda value: (bytes(value),),
    "builtins.dict_keys": tuple,
    "builtins.dict_items": tuple,
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "datetime.timezone": lambda value: value.__getinitargs__(),
    **{f"datetime.{name}": lambda value: value.__reduce__()[1] for name in ("date", "datetime", "time", "timedelta")},
    "zoneinfo.ZoneInfo": lambda value: (value.key,),
    "uuid.UUID": lambda value: (str(value),),
    "array.array": lambda value: (value.typecode, tuple(value)),
    **{f"pathlib.{name}": lambda value: value.parts for name in ("PosixPath", "PurePosixPath")},
}
MAKERS: dict[str, Callable[..., Any]] = {  # if not the type itself
    "builtins.ellipsis": lambda: Ellipsis,
    "builtins.NotImplementedType": lambda: NotImplemented,
    "builtins.bytes": bytes.fromhex,
    "builtins.dict_keys": lambda *keys: dict.fromkeys(keys).keys(),
    "builtins.dict_items": lambda *items: dict(items).items(),
}
TYPES = {"NoneType": type(None)} | {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
SCALARS = frozenset({type(None), bool, int, float, str})
MAX_NAME = 100


class Shared:
    """A container that both processes use, and its content when they last agreed; None while it is being filled."""

    __slots__ = ("agreed", "container")

    def __init__(self, container: Any) -> None:
        self.container, self.agreed = container, ""


class Values:
    """The values that one of the processes exchanges with the other."""

    def __init__(self, connection: Connection, first: int, *, trusting: bool) -> None:
        """Makes the tables.

        Args:
            first: 0 in one process, 1 in the other: shared containers are numbered in steps of two from here.
            trusting: Whether the other process may name functions of the standard library to use here.
        """
        self._connection, self._next, self._trusting = connection, first, trusting
        self._objects: list[Any] = []  # of this process, used by the other
        self._numbers: dict[int, int] = {}  # their numbers, by id
        self._described: set[int] = set()  # those that the other process knows
        self._proxies: dict[int, Any] = {}  # of the other process's objects
        self._shared: dict[int, Shared] = {}
        self._shared_numbers: dict[int, int] = {}  # by id
        # Of the message that is being encoded:
        self._new_containers: list[tuple[int, Any]] = []
        self._new_objects: list[int] = []
        self._agreed: dict[int, str] = {}
        self._dropped: list[int] = []

    def encode(self, message: tuple[Any, ...]) -> list[Any]:
        """Returns a message as JSON; call `commit` once it is sent, else `rollback`."""
        self._dropped = self._find_unused()
        changes = []
        for number, shared in list(self._shared.items()):
            if shared.agreed:
                content = self._encode_content(shared.container)
                if (text := json.dumps(content)) != shared.agreed:
                    changes.append([number, content])
                    self._agreed[number] = text
        body = [self._encode(part) for part in message]
        definitions = []
        for number, container in self._new_containers:  # grows meanwhile
            content = self._encode_content(container)
            extra = container.maxlen if type(container) is deque else getattr(container, "default_factory", None)
            definitions.append([number, type(container).__name__, self._encode(extra), content])
            self._agreed[number] = json.dumps(content)
        return [self._dropped, changes, body, definitions]

    def commit(self) -> None:
        """Notes that the other process has the message."""
        for number, text in self._agreed.items():
            self._shared[number].agreed = text
        for number in self._dropped:
            self._forget(number)
        self._clear()

    def rollback(self) -> None:
        """Forgets what the message would have told the other process."""
        for number, _ in self._new_containers:
            self._forget(number)
        self._described.difference_update(self._new_objects)
        self._clear()

    def _clear(self) -> None:
        self._new_containers, self._new_objects, self._agreed, self._dropped = [], [], {}, []

    def decode(self, message: Any) -> list[Any]:
        """Returns the parts of a message."""
        dropped, changes, body, definitions = message
        for number, name, extra, _ in definitions:
            self._share(number, CONTAINERS[name](*(((), extra) if name == "deque" else ())))
        decoded = [(number, self._decode_content(number, content)) for number, content in changes]
        parts = [self._decode(part) for part in body]
        for number, _, extra, content in definitions:
            decoded.append((number, self._decode_content(number, content)))
            if isinstance(container := self._shared[number].container, defaultdict):
                container.default_factory = self._decode(extra)
        for number, items in decoded:
            self._shared[number].agreed = ""  # hashing a proxy sends messages
            _fill(self._shared[number].container, items)
        for number in dropped:
            self._forget(number)
        for number in {number for number, _ in decoded}.difference(dropped):
            self._shared[number].agreed = json.dumps(self._encode_content(self._shared[number].container))
        return parts

    def is_given(self, value: object) -> bool:
        """Returns whether a value is an object of this process that the other one uses."""
        number = self._numbers.get(id(value))
        return number is not None and self._objects[number] is value

    def _find_unused(self) -> list[int]:
        """Returns the numbers of shared containers to which nothing else refers here."""
        only_here = Shared([])
        unused = sys.getrefcount(only_here.container)
        return [
            number
            for number, shared in self._shared.items()
            if shared.agreed and sys.getrefcount(shared.container) <= unused
        ]

    def _share(self, number: int, container: Any) -> None:
        self._shared[number] = Shared(container)
        self._shared_numbers[id(container)] = number

    def _forget(self, number: int) -> None:
        if shared := self._shared.pop(number, None):
            del self._shared_numbers[id(shared.container)]

    def _encode_content(self, container: Any) -> list[Any]:
        if isinstance(container, dict):
            return [[self._encode(key), self._encode(value)] for key, value in dict.items(container)]
        items = list(container)
        return items if SCALARS.issuperset(map(type, items)) else [self._encode(item) for item in items]

    def _decode_content(self, number: int, content: list[Any]) -> list[Any]:
        if isinstance(self._shared[number].container, dict):
            return [(self._decode(key), self._decode(value)) for key, value in content]
        return [self._decode(item) for item in content]

    def _encode(self, value: Any) -> Any:
        """Encodes a value: text, numbers and None as themselves, others as a list with a tag."""
        kind = type(value)
        if kind in SCALARS:
            return value
        if kind in (tuple, frozenset):
            return [kind.__name__, [self._encode(item) for item in value]]
        if CONTAINERS.get(kind.__name__) is kind:
            return ["container", self._container_number(value)]
        if is_remote(value):
            return ["yours", value.__remote__.number]
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in BY_ARGUMENTS and _find(name) in (kind, None):
            return ["value", name, [self._encode(argument) for argument in BY_ARGUMENTS[name](value)]]
        if is_exception(kind):
            arguments = value.__reduce__()[1]  # unlike `args`, with the path of an OSError
            if isinstance(value, BaseExceptionGroup):
                arguments = (value.message, value.exceptions)
            return ["exception", kind.__name__, [self._encode(argument) for argument in arguments]]
        if kind.__module__ == "numpy" and (encoded := self._encode_numpy(value)) is not None:
            return encoded
        if kind is type and TYPES.get(getattr(value, "__name__", "")) is value:
            return ["type", getattr(value, "__name__", "")]
        if not self._trusting and (library_name := _library_name(value)):
            return ["library", library_name]
        return self._encode_object(value, kind)

    def _container_number(self, container: Any) -> int:
        number = self._shared_numbers.get(id(container))
        if number is None:
            number, self._next = self._next, self._next + 2
            self._share(number, container)
            self._new_containers.append((number, container))
        return number

    def _encode_object(self, value: Any, kind: type) -> list[Any]:
        """Encodes an object that stays here: its number, with its description the first time."""
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        if number in self._described:
            return ["object", number]
        self._described.add(number)
        self._new_objects.append(number)
        if isinstance(value, type):
            names = [str(name)[:MAX_NAME] for name in (value.__name__, value.__qualname__)]
            return ["class", number, *names, [self._encode(base) for base in value.__bases__]]
        if isinstance(value, types.CoroutineType):
            return ["coroutine", number]
        base = plain_base(kind)
        content = () if base is None else value.args if issubclass(base, BaseException) else (_as(base, value),)
        return ["object", number, self._encode_object(kind, type), [self._encode(part) for part in content]]

    def _encode_numpy(self, value: Any) -> list[Any] | None:
        import numpy

        array = numpy.asarray(value)
        if type(value) is not numpy.ndarray and not isinstance(value, numpy.generic):
            return None
        if array.dtype.names is not None:
            return None
        scalar = isinstance(value, numpy.generic)
        if array.dtype.hasobject:
            return ["array", "O", list(array.shape), [self._encode(item) for item in array.ravel().tolist()], scalar]
        data = base64.b64encode(numpy.ascontiguousarray(array).tobytes()).decode()
        return ["array", array.dtype.str, list(array.shape), data, scalar]

    def _decode(self, value: Any) -> Any:
        if not isinstance(value, list):
            if type(value) not in SCALARS:
                raise ValueError("JSON objects are not sent")
            return value
        match value:
            case ["tuple" | "frozenset" as name, list(items)]:
                return (tuple if name == "tuple" else frozenset)(self._decode(item) for item in items)
            case ["container", int(number)]:
                return self._shared[number].container
            case ["yours", int(number)] if number >= 0:
                return self._objects[number]
            case ["object", int(number)]:
                return self._proxies[number]
            case ["value", str(name), list(arguments)] if name in BY_ARGUMENTS:
                return (MAKERS.get(name) or _find(name))(*map(self._decode, arguments))
            case ["exception", str(name), list(arguments)]:
                return _builtin(name, BaseException)(*map(self._decode, arguments))
            case ["type", str(name)]:
                return _builtin(name, object)
            case ["array", str(kind), list(shape), data, bool(scalar)]:
                return self._decode_numpy(kind, shape, data, scalar)
            case ["library", str(name)] if self._trusting:
                return _find(name)
            case ["class", int(number), str(name), str(qualname), list(bases)]:
                kinds = tuple(base for base in map(self._decode, bases) if isinstance(base, type))
                proxy: Any = mirror_class(self._connection, number, name, qualname, kinds)
            case ["coroutine", int(number)]:
                proxy = self._await(make_object(self._connection, number, RemoteObject, ()))
            case ["object", int(number), kind, list(content)]:
                mirror = self._decode(kind)
                if not isinstance(mirror, RemoteClass):
                    raise ValueError("an object without a class")
                proxy = make_object(self._connection, number, mirror, tuple(map(self._decode, content)))
            case _:
                raise ValueError("an unknown value")
        self._proxies[number] = proxy
        return proxy

    def _decode_numpy(self, kind: str, shape: list[int], data: Any, scalar: bool) -> Any:
        import numpy

        if kind == "O":
            array = numpy.empty(len(data), dtype=object)
            array[:] = [self._decode(item) for item in data]
        else:
            array = numpy.frombuffer(base64.b64decode(data), numpy.dtype(kind)).copy()
        array = array.reshape(shape)
        return array[()] if scalar else array

    async def _await(self, coroutine: Any) -> Any:
        return self._connection.request("await", coroutine)


def _as(base: Any, value: Any) -> Any:
    """Returns the value of an object whose class extends an immutable built-in one, as that one's."""
    if issubclass(base, str):
        return str.__str__(value)
    if base in (tuple, frozenset, bytes):
        return base(base.__iter__(value))
    return base(getattr(base, "__float__" if base is float else "__int__", complex.__pos__)(value))


def _builtin(name: str, base: type) -> Any:
    if not issubclass(TYPES[name], base):
        raise ValueError(f"{name} is not a {base.__name__}")
    return TYPES[name]


def _library_name(value: Any) -> str | None:
    """Returns the name of a function or class of the standard library."""
    owner = getattr(value, "__objclass__", value)
    module, name = getattr(owner, "__module__", None), getattr(value, "__qualname__", None)
    if callable(value) and isinstance(module, str) and module.partition(".")[0] in sys.stdlib_module_names:
        name = f"{module}.{name}"
        return name if _find(name) is value else None
    return None


def _find(name: str) -> Any:
    """Returns the object of the standard library with a full name, such as `datetime.date`; None if there is none."""
    module, _, path = name.partition(".")
    try:
        value: Any = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return None
    return value


def _fill(container: Any, items: list[Any]) -> None:
    """Replaces a container's content."""
    type(container).clear(container)
    if isinstance(container, dict):
        for key, value in items:
            container[key] = value
    elif isinstance(container, set):
        container.update(items)
    else:
        container.extend(items)

"""Proxies: objects and classes of the other process.

An object of the other process is an instance of a class that mirrors its class there, so that `type`, `isinstance`,
`issubclass` and `except` work as usual. Attributes, calls and operators are requested from the other process.

A program must not decide about a test's verdict. So its objects are never equal to, less than, or containers of a
test's own value, and arithmetic with such a value yields an object of the program only, which is not converted to a
number (`tester`).
"""

import builtins
import copy
import math
import operator
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Protocol


def _named(*names: str) -> dict[str, Callable[..., Any]]:
    """Returns functions of `operator`, `math` or Python itself by special name, such as `__add__`."""
    functions = {**vars(builtins), **{name: getattr(math, name) for name in ("trunc", "floor", "ceil")}}
    return {f"__{name}__": vars(operator).get(f"__{name}__") or functions[name] for name in names}


COMPARISONS = _named("eq", "ne", "lt", "le", "gt", "ge")
ARITHMETIC = _named(
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod"),
    *("pow", "lshift", "rshift", "and", "or", "xor"),
)
for _name, _function in list(ARITHMETIC.items()):
    ARITHMETIC[f"__r{_name[2:]}"] = lambda x, y, _function=_function: _function(y, x)
    if _name != "__divmod__":
        ARITHMETIC[f"__i{_name[2:]}"] = getattr(operator, f"__i{_name[2:]}")
NUMBERS = _named(
    *("bool", "int", "float", "complex", "index", "abs", "neg", "pos", "invert"),
    *("round", "trunc", "floor", "ceil"),
)
OTHERS: dict[str, Callable[..., Any]] = {
    **_named("len", "iter", "next", "reversed", "hash", "str", "repr", "format"),
    **_named("getitem", "setitem", "delitem", "contains", "aiter", "anext"),
    "__copy__": copy.copy,
    "__deepcopy__": lambda target, _: copy.deepcopy(target),
    "__instancecheck__": lambda kind, instance: isinstance(instance, kind),
    "__enter__": lambda target: target.__enter__(),
    "__exit__": lambda target, kind, error, _: target.__exit__(kind, error, None),
    "__aenter__": lambda target: target.__aenter__(),
    "__aexit__": lambda target, kind, error, _: target.__aexit__(kind, error, None),
}
OPERATORS = COMPARISONS | ARITHMETIC | NUMBERS | OTHERS
# Special names that are requested. Others, such as __array_ufunc__, would leave a test's verdict to the program.
ATTRIBUTES = frozenset(
    f"__{name}__"
    for name in (
        *("name", "qualname", "annotations", "wrapped", "defaults", "kwdefaults", "closure", "code", "self", "func"),
        *("members", "slots", "match_args", "init", "version", "author", "cause", "context", "notes"),
    )
)
PLAIN_CLASSES = (int, float, complex, str, bytes, tuple, frozenset)  # immutable: an instance's value is sent with it


class Connection(Protocol):
    """The connection to the other process, as proxies use it; see `Peer`."""

    def request(self, operation: str, *arguments: object) -> Any:
        """Lets the other process execute an operation."""

    def call(self, target: object, positional: tuple[object, ...], keywords: dict[str, object]) -> Any:
        """Calls a function or class of the other process."""

    def operate(self, name: str, target: object, *operands: object) -> Any:
        """Applies an operator to an object of the other process."""


class Reference:
    """Where an object of the other process is.

    Attributes:
        connection: The connection to its process.
        number: Its number there.
        informed: Whether arithmetic with a value of this process made it.
    """

    __slots__ = ("connection", "informed", "number")

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection, self.number, self.informed = connection, number, False


def _call(target: Any, /, *arguments: object, **keywords: object) -> Any:
    return target.__remote__.connection.call(target, arguments, keywords)


def _get(target: Any, name: str) -> Any:
    if name.startswith("__") and name.endswith("__") and name not in ATTRIBUTES:
        raise AttributeError(name)
    return target.__remote__.connection.request("attribute", target, name)


def _set(target: Any, name: str, value: object) -> None:
    target.__remote__.connection.request("set", target, name, value)


def _requested(name: str) -> Any:
    """Returns a property for an attribute that every object here has, too."""

    def get(target: Any) -> Any:
        return target.__remote__.connection.request("attribute", target, name)

    return property(get)


def _forward(name: str) -> Callable[..., Any]:
    """Returns the method of proxies for an operator."""

    def method(self: Any, *arguments: object) -> Any:
        return self.__remote__.connection.operate(name, self, *arguments)

    method.__name__ = name
    return method


class RemoteClass(type):
    """The class of classes that mirror those of the other process."""

    if TYPE_CHECKING:
        __remote__: Reference

    __mro__, __bases__, __annotations__ = map(_requested, ("__mro__", "__bases__", "__annotations__"))

    __call__, __getattr__, __setattr__ = _call, _get, _set

    def __instancecheck__(cls, instance: object) -> bool:
        if type.__instancecheck__(cls, instance):
            return True
        return isinstance(instance, RemoteObject) and bool(
            cls.__remote__.connection.request("__instancecheck__", cls, instance)
        )

    def __bool__(cls) -> bool:
        return True

    __iter__, __len__, __getitem__ = map(_forward, ("__iter__", "__len__", "__getitem__"))


class RemoteObject:
    """An object of the other process."""

    if TYPE_CHECKING:  # the attribute __annotations__ is that of the object
        __remote__: Reference

    __dict__, __doc__, __annotations__ = map(_requested, ("__dict__", "__doc__", "__annotations__"))

    def __await__(self) -> Generator[None, None, Any]:
        return self.__remote__.connection.request("await", self)
        yield

    __call__, __getattr__, __setattr__ = _call, _get, _set

    @property
    def __signature__(self) -> Any:
        """The parameters of a function, for `inspect.signature`; defaults are None."""
        import inspect

        kind_type: Any = type(inspect.Parameter.POSITIONAL_ONLY)
        return inspect.Signature(
            [
                inspect.Parameter(name, kind_type(kind), default=None if has_default else inspect.Parameter.empty)
                for name, kind, has_default in self.__remote__.connection.request("signature", self)
            ]
        )

    def __delattr__(self, name: str) -> None:
        self.__remote__.connection.request("delete", self, name)


_DOC = type.__getattribute__(RemoteObject, "__dict__")["__doc__"]


def is_remote(value: object) -> bool:
    """Returns whether a value is an object or a class of the other process."""
    return isinstance(value, RemoteObject | RemoteClass)


for _name in OPERATORS:
    setattr(RemoteObject, _name, _forward(_name))


def mirror_class(connection: Connection, number: int, name: str, qualname: str, bases: tuple[type, ...]) -> RemoteClass:
    """Returns a class that mirrors one of the other process.

    Args:
        qualname: Its name with those of the classes that contain it.
        bases: Its bases: mirrors, and built-in classes. Of these, exceptions and immutable ones stay bases.
    """
    parents = [base for base in bases if isinstance(base, RemoteClass) or base in PLAIN_CLASSES or is_exception(base)]
    if not any(issubclass(base, RemoteObject) for base in parents):
        parents.append(RemoteObject)
    namespace: dict[str, Any] = {"__module__": "solution", "__qualname__": qualname, "__doc__": _DOC}
    if not all(isinstance(base, RemoteClass) or base is RemoteObject for base in parents):
        namespace |= {operation: _forward(operation) for operation in ("__str__", "__repr__", "__format__")}
    try:
        mirror = type.__new__(RemoteClass, name, tuple(parents), namespace)
    except TypeError:  # built-in bases that cannot be combined here
        mirror = type.__new__(RemoteClass, name, (RemoteObject,), namespace)
    type.__setattr__(mirror, "__remote__", Reference(connection, number))
    return mirror


def plain_base(kind: type) -> type | None:
    """Returns the immutable built-in class, or the built-in exception, that a class extends, if any."""
    return next((base for base in type.mro(kind)[1:] if base in PLAIN_CLASSES or is_exception(base)), None)


def is_exception(kind: type) -> bool:
    """Returns whether a class is a built-in exception."""
    return issubclass(kind, BaseException) and kind.__module__ == "builtins"


def make_object(connection: Connection, number: int, kind: type, content: tuple[Any, ...]) -> Any:
    """Returns the proxy of an object.

    Args:
        content: Arguments that make its value, if its class extends a built-in one.
    """
    base = plain_base(kind) or object
    value = base.__new__(kind, *content)
    object.__setattr__(value, "__remote__", Reference(connection, number))
    return value

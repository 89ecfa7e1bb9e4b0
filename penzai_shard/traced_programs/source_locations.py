"""Where in the user's source an operation of a traced program comes from."""

import functools
import pathlib
import re
import sysconfig
from collections.abc import Sequence
from typing import Any

import jax
import penzai

from penzai_shard.library_apis.jax_api import scope_path, source_frames

_JAX = pathlib.Path(jax.__file__).parent
_PENZAI_CORE = pathlib.Path(penzai.__file__).parent / "core"
_OWN = pathlib.Path(__file__).parents[1]
_STANDARD_LIBRARY = pathlib.Path(sysconfig.get_paths()["stdlib"])
_THIRD_PARTY = "site-packages"
_BEHIND_JAX = {"opt_einsum", "numpy"}
_COLLECTIVES = jax.lax.psum.__code__.co_filename
_ONLY_TRANSFORMED = re.compile(r"(\w+\()+\)+")
_CALL = ".__call__"


def location_text(chain: Sequence[Any], entry: str = "") -> str:
    """An operation, the layers that do it, and its source line.

    Args:
        chain: The equations of a traced program that call each other, the operation last.
        entry: The file of ours that calls the model; what called that is left out.

    Returns:
        Such as ``'rev' (in 'flip') of Sequential > Reverse (model.py:12)``.

    >>> jaxpr = jax.make_jaxpr(lambda x: x[::-1])(jax.numpy.ones(3))
    >>> location_text(jaxpr.eqns[:1]).split(" (")[0]
    "'rev'"
    """
    if not chain:
        return "a result"
    text = repr(public_name(chain[-1]))
    calls = [name for one in chain if (name := function_name(one)) is not None]
    if calls:
        text += f" (in {calls[-1]!r})"
    frames: list[Any] = []
    for equation in chain:
        # A function that was compiled before brings the frames of its first caller.
        own = _user_frames(equation, entry)
        if own[: len(frames)] == frames:
            frames = own
    scopes = scope_path(chain[-1]).split("/")
    path = "/".join(scope for scope in scopes if not _ONLY_TRANSFORMED.fullmatch(scope))
    if path:
        text += f" at {path!r}"
    layers = [name.removesuffix(_CALL) for _, name, _ in frames if name.endswith(_CALL)]
    if layers:
        text += f" of {' > '.join(name.rsplit('.', 1)[-1] for name in layers)}"
    return text + (f" ({pathlib.Path(frames[-1][0]).name}:{frames[-1][2]})" if frames else "")


def _user_frames(equation: Any, entry: str) -> list[tuple[str, str, int]]:
    """File, function and line of each call outside of libraries' internals, outermost first."""
    frames = source_frames(equation)
    outside = next((i for i, (file, *_) in enumerate(frames) if file == entry), len(frames))
    return [frame for frame in reversed(frames[:outside]) if not _is_internal(frame[0])]


@functools.cache
def _is_internal(file: str) -> bool:
    path = pathlib.Path(file)
    if any(path.is_relative_to(internal) for internal in (_JAX, _PENZAI_CORE, _OWN)):
        return True
    if _THIRD_PARTY in path.parts and _BEHIND_JAX.intersection(path.parts):
        return True
    return path.is_relative_to(_STANDARD_LIBRARY) and _THIRD_PARTY not in path.parts


def function_name(equation: Any) -> str | None:
    """The name of the compiled function that an operation calls, if it calls one.

    >>> function_name(jax.make_jaxpr(lambda x: jax.numpy.flip(x))(jax.numpy.ones(3)).eqns[0])
    'flip'
    """
    name = equation.params.get("name")
    return name.lstrip("_") if isinstance(name, str) else None


def public_name(equation: Any) -> str:
    """The name by which a user called an operation, as far as that is known.

    >>> public_name(jax.make_jaxpr(lambda x: x[::-1])(jax.numpy.ones(3)).eqns[0])
    'rev'
    """
    called = [
        function
        for file, function, _ in source_frames(equation)
        if file == _COLLECTIVES and not function.startswith("_")
    ]
    name = equation.primitive.name
    # ``pmean`` does a ``psum_invariant``. The first function of the file is the outermost one.
    return called[-1] if called and "." not in called[-1] else name


def exception_location_text(error: BaseException) -> str:
    """The source line in the user's code at which an exception was raised."""
    found = ""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not _is_internal(code.co_filename):
            found = f" ({pathlib.Path(code.co_filename).name}:{traceback.tb_lineno})"
        traceback = traceback.tb_next
    return found

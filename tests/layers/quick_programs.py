"""Many small programs compiled as one, which costs much less than each of them alone."""

import jax

from penzai_shard.library_apis.jax_api import UNOPTIMISED_COMPILATION


def results_together(functions, *arguments):
    """What each function gives, by name; the exception of one that cannot be traced.

    Args:
        functions: The functions by name.
        *arguments: The arguments of all of them.
    """
    found = {}
    traced = {}
    for name, function in functions.items():
        traced[name] = jax.jit(function)
        try:
            traced[name].trace(*arguments)
        except Exception as error:
            found[name] = error
            del traced[name]

    def together(*arguments):
        return {name: function(*arguments) for name, function in traced.items()}

    compiled = jax.jit(together).lower(*arguments).compile(UNOPTIMISED_COMPILATION)
    return found | compiled(*arguments)


def result_of(result):
    """A result, or its exception raised."""
    if isinstance(result, Exception):
        raise result
    return result

"""Finds which stored array fills which wanted one, and all that keeps the two sides apart.

Nothing is read for it: both sides are names, shapes and dtypes by path. The result says how each
wanted array is made of stored ones, so that another order of axes, or a stack of blocks, costs no
step after reading.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from penzai_shard import errors
from penzai_shard.checkpoints.filling import Source
from penzai_shard.checkpoints.records import ArrayRecord
from penzai_shard.errors import Problem, Problems
from penzai_shard.paths import fold_key, fold_paths, matches, nearest, pattern_parts, rename

# What the paths of a train state's parameters begin with, and of what its optimizer keeps.
PARAMETERS, OPTIMIZER = "params/", "opt_state/"

_MOST_SUGGESTIONS = 100
# Kinds of problems that ``allow`` lets through.
_WORDS = ("transpose", "cast", "extra", "blocks")
_WILDCARDS = re.compile(r"\*+|\?")
# What an optimizer calls its arrays, in a folded path: no moment is to be filled with another.
_MOMENT = re.compile(rf"^{OPTIMIZER}(?:\*/)*[^/]*")
# Penzai calls a block "block_3", and the axis of a stack of them, as its piece of a path, "blocks".
_STACK_AXIS = "blocks"
_STACK = re.compile(r"(?<![^./\[\]])blocks(?![^./\[\]])")
_BLOCK = re.compile(r"(?<![^./\[\]])block_(\d+)(?![^./\[\]])")


# Options


@dataclasses.dataclass
class Options:
    """What may differ between what is stored and what is wanted, and which arrays are asked for.

    Args:
        called: The function that was called, for messages.
        allow: Kinds of problems that are none here.
        rename_axes: The wanted name of a stored logical axis.
        names: The wanted path of a stored path or pattern, of which the first that fits decides;
            None leaves the array in the checkpoint.
        only: Patterns of the wanted paths that are asked for; None for all.
        except_: Patterns of those that are not.
        others: ``"keep"`` if what is not asked for, or if all is, not stored, keeps its values.
        axes: The logical axes of stored arrays by pattern, of which the first that fits decides;
            other arrays without names get the wanted ones in the order that their lengths tell, and
            are refused if several fit. If it is None, arrays without names are compared by shape.
        verify: Whether numbers are compared with their checksums.
        progress: Whether a bar is shown, as ``progress.progress`` takes it.
        more: Other options of the function, as ``check_arguments`` takes them.

    Raises:
        RuleTypeError: Some cannot be read; all of them are in it.
    """

    called: str
    allow: Any = ()
    rename_axes: Any = None
    names: Any = None
    only: Any = None
    except_: Any = None
    others: Any = "error"
    axes: Any = None
    verify: Any = True
    progress: bool | None = None
    more: dataclasses.InitVar[Mapping[str, tuple[Any, bool, str]] | None] = None

    def __post_init__(self, more: Mapping[str, tuple[Any, bool, str]] | None) -> None:
        words, patterns, left = (
            tuple(x) if isinstance(x, list | tuple | set) else () if x is None else (x,)
            for x in (self.allow, self.only, self.except_)
        )
        is_known, rules = {*map(str, words)} <= {*_WORDS}, "{'stored': 'wanted'}"
        is_map, is_word = isinstance(self.axes, Mapping | None), self.others in ("error", "keep")
        checks = {
            "allow": (self.allow, is_known, f"allow='cast', or several of {_WORDS}"),
            "only": (self.only, _are_texts(patterns), "only='**/weights'"),
            "except_": (self.except_, _are_texts(left), "except_='**/weights'"),
            "rename_axes": (self.rename_axes, _are_rules(self.rename_axes), f"rename_axes={rules}"),
            "names": (self.names, _are_rules(self.names), f"names={rules}"),
            "axes": (self.axes, is_map, "axes={'stored': ('axis', None)}"),
            "others": (self.others, is_word, "others='error' or 'keep'"),
            "verify": (self.verify, isinstance(self.verify, bool), "verify=True or False"),
        }
        errors.check_arguments(self.called, checks | dict(more or {}))
        self.allow, self.only, self.except_ = words, patterns or ("**",), left
        self.rename_axes, self.names = self.rename_axes or {}, self.names or {}

    def asks_for(self, path: str) -> bool:
        """Whether an array is asked for."""
        is_in = any(matches(pattern, path) for pattern in self.only)
        return is_in and not any(matches(pattern, path) for pattern in self.except_)

    def choose(self, paths: Collection[str]) -> list[str]:
        """The arrays that are asked for.

        Raises:
            SelectionError: A pattern fits none, or they leave none.
        """
        problems = Problems("no array is chosen:")
        for pattern in (*self.only, *self.except_):
            if not any(matches(pattern, path) for path in paths):
                problems.add(pattern, "no path of the model fits it", _suggest(pattern, paths))
        chosen = [path for path in paths if self.asks_for(path)]
        if not chosen and not problems:
            problems.add("", "no parameter is left", "Write other patterns, or none.")
        problems.raise_if_any(errors.SelectionError)
        return chosen


def _suggest(name: str, known: Iterable[Any]) -> str:
    """What to write in place of a name that nothing has; nothing where none is near."""
    known = [*dict.fromkeys(map(fold_key, known) if "*" in name else known)]
    near = known[0] if len(known) == 1 else nearest(name, known)
    return f"Write {near!r}." if near else ""


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _are_rules(value: Any) -> bool:
    """Whether it says for texts other texts, or None."""
    if not isinstance(value, Mapping):
        return value is None
    return _are_texts([*value, *(x for x in value.values() if x is not None)])


# Matching


def match(
    stored: Mapping[str, ArrayRecord],
    wanted: Mapping[str, ArrayRecord],
    options: Options,
    *,
    headline: str,
    own: Collection[str] = (),
    holder: str = "the checkpoint",
) -> dict[str, Source]:
    """Finds what fills each array, or refuses everything that is wrong.

    Args:
        stored: What there is, by path. Records without names are compared by shape only.
        wanted: What a model has, by path.
        options: What may differ, and what is asked for.
        headline: The first line of the error.
        own: The wanted arrays that have values, which they can keep.
        holder: What has the stored arrays, for messages.

    Returns:
        What each array is made of, by path, without those that keep their values.

    Raises:
        CheckpointMismatchError: With a problem for each difference.
        SelectionError: A pattern fits nothing.
    """
    matching = _Matching(stored, wanted, options, holder)
    chosen = set(options.choose(wanted))
    kept = set(own) if options.others == "keep" else set()
    sources: dict[str, Source] = {}
    missing: list[str] = []
    for path, record in wanted.items():
        found = matching.find(path)
        if path not in chosen:
            if path not in kept:
                matching.add(path, "it is not asked for", "missing", "Write others='keep'.")
        elif found is not None:
            sources[path] = matching.compare(path, *found, record)
        elif path not in kept or chosen != wanted.keys():
            missing.append(path)
    if not sources and not matching.problems:
        missing = [*chosen]
    # Where nothing is found, keeping all would be refused too.
    matching.report_rest(missing, own if sources and not kept else ())
    matching.raise_problems(headline)
    return sources


def name_arrays(records: Mapping[str, ArrayRecord], options: Options) -> dict[str, str]:
    """The path of the model's array that gets each name by ``options.names``.

    Raises:
        CheckpointMismatchError: Names cannot be given so; with all that is wrong.
    """
    matching = _Matching(records, {}, options, "the model")
    matching.raise_problems("the parameters cannot be named so:")
    return {name: path for path, name in matching.names.items()}


def _count_blocks(record: ArrayRecord) -> int:
    sizes = dict(zip(record.names or (), record.shape, strict=False))
    return sizes.get(_STACK_AXIS, 0)


@dataclasses.dataclass
class _Matching:
    """Two sides, and the problems between them that ``allow`` does not let through."""

    stored: Mapping[str, ArrayRecord]
    wanted: Mapping[str, ArrayRecord]
    options: Options
    holder: str

    def __post_init__(self) -> None:
        self.problems: list[Problem] = []
        self.stored = self._rename_axes(self._name_axes(self.stored))
        self.names = self._name()
        # Dots and slashes part the pieces of a path, so that a flat dictionary fills a nested one.
        self.path_of = {pattern_parts(name): path for path, name in self.names.items()}
        # The numbers of the blocks that fill nothing; one number for a whole array.
        self.left = {path: {*range(_count_blocks(self.stored[path]) or 1)} for path in self.names}
        self.wanted_axes = {None, *(name for r in self.wanted.values() for name in r.names or ())}

    def add(self, path: str, what: str, kind: str, fix: str = "") -> None:
        if kind not in self.options.allow:
            self.problems.append(Problem(path, what, fix, kind))

    def raise_problems(self, headline: str) -> None:
        words = [problem.kind for problem in self.problems if problem.kind in _WORDS]
        # One fix for all that can be allowed: written once, it is enough.
        fix = f"Write allow={tuple(dict.fromkeys([*self.options.allow, *words]))}."
        fixes = dict.fromkeys(_WORDS, fix)
        fixes["axes"] = f"Write rename_axes={self.renames}." if self.renames else ""
        problems = [
            dataclasses.replace(p, fix=p.fix or fixes.get(p.kind, "")) for p in self.problems
        ]
        if problems:
            raise errors.CheckpointMismatchError(headline, problems)

    # Names

    def _name_axes(self, stored: Mapping[str, ArrayRecord]) -> dict[str, ArrayRecord]:
        named: dict[str, ArrayRecord] = {}
        for pattern, names in (self.options.axes or {}).items():
            fitting = [path for path in stored if matches(pattern, path)]
            if not fitting:
                what = f"axes: no stored path fits {pattern!r}"
                self.add("", what, "axes", _suggest(pattern, stored))
            for path in fitting:
                if not isinstance(names, list | tuple) or len(names) != len(stored[path].shape):
                    what = f"axes: {pattern!r} gives {names!r} to {stored[path]}"
                    self.add(path, what, "axes", "Give a name for each dimension, or None.")
                else:
                    named.setdefault(path, dataclasses.replace(stored[path], names=tuple(names)))
        return {**stored, **named}

    def _rename_axes(self, stored: Mapping[str, ArrayRecord]) -> dict[str, ArrayRecord]:
        new: dict[Any, str] = self.options.rename_axes
        known = {name for r in stored.values() for name in r.names or () if name}
        for old in [name for name in new if name not in known]:
            what = f"rename_axes: no stored array has logical axis {old!r}"
            self.add("", what, "axes", _suggest(old, known))
        self.renames = {old: name for old, name in new.items() if old in known}
        self.old_axes = {name: old for old, name in self.renames.items()}
        return {
            path: dataclasses.replace(r, names=r.names and tuple(new.get(n, n) for n in r.names))
            for path, r in stored.items()
        }

    def _name(self) -> dict[str, str]:
        """The path that each stored array has in the model, without those that stay."""
        rules, paths = self.options.names, self.stored
        named: dict[str, str | None] = {}
        for pattern, new in rules.items():
            fitting = [path for path in paths if path not in named and matches(pattern, path)]
            named.update(dict.fromkeys(fitting))
            if not fitting:
                what = f"names: no stored path, or none that is left, fits {pattern!r}"
                self.add("", what, "names", _suggest(pattern, paths))
            elif new is not None and _WILDCARDS.findall(pattern) != _WILDCARDS.findall(new):
                what = f"names: the wildcards of {pattern!r} and {new!r} differ"
                self.add("", what, "names", f"Write those of {pattern!r} in their order.")
            elif new is not None:
                for path in fitting:
                    named[path] = rename(pattern, new, path)
                    if named[path] is None:
                        what = f"names: {pattern!r} fits it in several ways"
                        self.add(path, what, "names", "Write fewer wildcards.")

        names = {path: name for path in paths if (name := named.get(path, path)) is not None}
        origins: dict[tuple[str, ...], str] = {}
        # What a rule names is wanted more than what is called so.
        for path in sorted(names, key=lambda path: path not in named):
            other = origins.setdefault(pattern_parts(names[path]), path)
            if other != path:
                what = f"{other!r} and {path!r} both get this path"
                fixed = {path: None, **{old: new for old, new in rules.items() if old != path}}
                self.add(names[path], what, "names", f"Write names={fixed}.")
        return names

    # What an array is made of

    def find(self, name: str) -> tuple[ArrayRecord, Source] | None:
        """What is stored for an array, by its path, and the record that it has then.

        The source has the order of what is stored, and blocks in front.
        """
        if path := self._path(name):
            self.left[path].clear()
            return self.stored[path], Source((path,), self.stored[path].shape, ())
        for piece in _STACK.finditer(name):
            blocks = (
                self._path(f"{name[: piece.start()]}block_{number}{name[piece.end() :]}")
                for number in itertools.count()
            )
            if paths := tuple(itertools.takewhile(bool, blocks)):
                for path in paths:
                    self.left[path].clear()
                first = self.stored[paths[0]]
                names = first.names and (_STACK_AXIS, *first.names)
                stack = dataclasses.replace(first, shape=(len(paths), *first.shape), names=names)
                return stack, Source(paths, first.shape, (), stack=0)
        for piece in _BLOCK.finditer(name):
            path = self._path(f"{name[: piece.start()]}blocks{name[piece.end() :]}")
            number = int(piece[1])
            if path and number < _count_blocks(self.stored[path]):
                self.left[path].discard(number)
                stack = self.stored[path]
                axes, shape = [*(stack.names or ())], [*stack.shape]
                dim = axes.index(_STACK_AXIS)
                del axes[dim], shape[dim]
                block = dataclasses.replace(stack, shape=tuple(shape), names=tuple(axes))
                return block, Source((path,), stack.shape, (), pick=(dim, number))
        return None

    def _path(self, name: str) -> str:
        return self.path_of.get(pattern_parts(name), "")

    def compare(
        self, path: str, stored: ArrayRecord, source: Source, wanted: ArrayRecord
    ) -> Source:
        """The source in the wanted order; adds what differs between the two sides."""
        both = f"{self.holder} has {stored}, and {wanted} is wanted"
        if source.stack is not None or source.pick is not None:
            self.add(path, f"its blocks are stored as {fold_paths(source.stored)!r}", "blocks")
        if len({str(self.stored[name]) for name in source.stored}) > 1:
            fix = "Give blocks with equal axes and dtypes."
            self.add(path, "its blocks are stored in several forms", "sizes", fix)
        if stored.key_impl != wanted.key_impl:
            fix = "Give jax.random.key(seed, impl=...), or its jax.random.key_data, as is stored."
            self.add(path, both, "key", fix)
        elif stored.dtype != wanted.dtype:
            self.add(path, f"the dtypes differ: {both}", "cast")

        if self.options.axes is not None and stored.names is None:
            stored = self._find_order(path, stored, source, wanted)
        # The stored dimension of each wanted one; as they come where no names are stored.
        rank = len(stored.shape)
        wanted_names = wanted.names or (None,) * len(wanted.shape)
        names = stored.names or (*wanted_names, *(None,) * rank)[:rank]
        order = tuple(range(rank))
        if Counter(names) != Counter(wanted_names):
            pairs: dict[Any, Any] = dict(zip(names, wanted_names, strict=False))
            pairs = {old: new for old, new in pairs.items() if old != new}
            fix = f"Give an array with axes {names}, for instance by name_axes(model, ...)."
            # An axis that others want under the old name cannot be renamed.
            if stored.shape == wanted.shape and not self.wanted_axes & pairs.keys():
                self.renames |= {self.old_axes.get(old, old): new for old, new in pairs.items()}
                fix = ""
            self.add(path, f"the logical axes differ: {both}", "axes", fix)
        else:
            free = [*order]
            order = tuple(
                free.pop(next(i for i, dim in enumerate(free) if names[dim] == name))
                for name in wanted_names
            )
            if tuple(stored.shape[dim] for dim in order) != wanted.shape:
                fix = "Build the model with the sizes that are stored."
                self.add(path, f"the sizes differ: {both}", "sizes", fix)

        stack, pick = source.stack, source.pick
        if pick is not None:
            order = tuple(dim + (dim >= pick[0]) for dim in order)
        if stack is not None:
            # Blocks are stacked wherever their axis is wanted.
            stack, order = order.index(0), tuple(dim - 1 for dim in order if dim)
        if [*order] != sorted(order):
            self.add(path, f"the axes have another order: {both}", "transpose")
        return dataclasses.replace(source, order=order, stack=stack)

    def _find_order(
        self, path: str, stored: ArrayRecord, source: Source, wanted: ArrayRecord
    ) -> ArrayRecord:
        """A record without names with the wanted ones; adds that several orders fit."""
        # Blocks are stored one by one.
        front = (_STACK_AXIS,) if source.stack is not None else ()
        free = [x for x in zip(wanted.names or (), wanted.shape, strict=False) if x[0] not in front]
        sizes = stored.shape[len(front) :]
        if sorted(sizes) != sorted(size for _, size in free):
            return stored
        # Where a dimension of one element stands changes nothing.
        lengths = [size for _, size in {*free} if size != 1]
        names = tuple(free.pop([n for _, n in free].index(size))[0] for size in sizes)
        if len(lengths) != len({*lengths}):
            what = f"{stored} is stored, of which nothing tells the order of {wanted}"
            axes = {**(self.options.axes or {}), fold_key(source.stored[0]): names}
            self.add(path, what, "axes", f"Write axes={axes}, or another order.")
        return dataclasses.replace(stored, names=(*front, *names))

    # What is left

    def report_rest(self, missing: Sequence[str], keepable: Collection[str]) -> None:
        """Adds the wanted arrays that have no stored one, and the stored ones that fill none."""
        rules = self._suggest_names(missing)
        # The first rule that fits decides: without those that only the paths of the new ones fit.
        rest = {path for path in self.stored if not any(matches(old, path) for old in rules)}
        given = self.options.names.items()
        old = {pattern: new for pattern, new in given if any(matches(pattern, x) for x in rest)}
        for path in missing:
            what = f"{self.holder} has no such array, and {self.wanted[path]} is wanted"
            fix = "Build what was saved, or keep own values: others='keep'."
            if any(matches(new, path) for new in rules.values()):
                fix = f"Write names={ {**rules, **old} }."
            elif path.startswith(OPTIMIZER):
                fix = "Give the old optimizer, or restore_params(path, state.model, mesh, rules)."
            elif path not in keepable:
                fix = ""
            self.add(path, what, "missing", fix)
        for path, name in self.names.items():
            if self.left[path] and path in rest and self.options.asks_for(name):
                what = f"{self.holder} has {self.stored[path]}, and the model no such array"
                self.add(name, f"{what}, or fewer blocks", "extra")

    def _suggest_depth(self) -> dict[str, str]:
        """A rule where all that the optimizer keeps stands deeper on one side, as in a chain."""
        start = len(OPTIMIZER)
        stored, wanted = (
            {path[start:]: x.shape for path, x in side.items() if path.startswith(OPTIMIZER)}
            for side in (self.stored, self.wanted)
        )
        for outer, inner in ((stored, wanted), (wanted, stored)):
            for path in inner:
                front = path.removesuffix(next(iter(outer), path))
                if front.endswith("/") and {front + x: outer[x] for x in outer} == inner:
                    high, low = f"{OPTIMIZER}**", f"{OPTIMIZER}{front}**"
                    return {high: low} if outer is stored else {low: high}
        return {}

    def _suggest_names(self, missing: Iterable[str]) -> dict[str, str]:
        """Rules for stored arrays that fill none: those of the same sizes with the nearest path."""
        if moved := self._suggest_depth():
            return moved
        # Blocks have one rule, with a wildcard for the number.
        left = {fold_key(path): self.stored[path] for path in self.names if self.left[path]}
        wanted = {fold_key(path): self.wanted[path] for path in missing}
        rules: dict[str, str] = {}
        # Where thousands differ, comparing all with all takes minutes, and nobody reads so much.
        for key, record in wanted.items() if len(wanted) <= _MOST_SUGGESTIONS else ():
            sizes, count, moment = sorted(record.shape), key.count("*"), _MOMENT.findall(key)
            alike = [old for old in left if sorted(left[old].shape) == sizes]
            alike = [old for old in alike if old.count("*") == count and old not in rules]
            alike = [old for old in alike if _MOMENT.findall(old) == moment]
            if old := alike[0] if len(alike) == 1 else nearest(key, alike):
                rules[old] = key
        # A whole tree that stands deeper has one rule.
        fronts = {old.removesuffix(new) for old, new in rules.items()}
        front = fronts.pop() if len(fronts) == 1 and len(rules) == len(wanted) else ""
        return {f"{front}**": "**"} if front.endswith("/") else rules

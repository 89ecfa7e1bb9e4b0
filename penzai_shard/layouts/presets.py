"""The layouts of the literature, each in one line."""

from collections.abc import Iterable
from typing import Any, Self

from penzai_shard.errors import Problems, RuleTypeError
from penzai_shard.paths import nearest
from penzai_shard.rules import AxisRules, MeshAxes, data_parallel, fully_sharded
from penzai_shard.rules import tensor_parallel as split_axes

# Arrays with fewer elements, such as the scale of a norm, are not worth gathering.
MIN_SIZE = 2**14
# The fields of a layout: tables of rules, and others, which are options of every preset.
TABLES = ("parameters", "compute", "optimizer", "between_blocks")
FIELDS = ("reshard_after_forward", "manual", "rematerialise", "precision", "blocks", "names")


def add_unknown(problems: Problems, path: str, given: Iterable[Any], known: Iterable[str]) -> None:
    """Collects what is given and not known, with the nearest name."""
    for key in (key for key in given if key not in [*known]):
        near = nearest(str(key), known)
        fix = f"Write {near!r}." if near else f"There are {', '.join(known)}."
        problems.add(path, f"{key!r} is not known", fix)


class LayoutPresets:
    """The presets of ``Layout``, which is what they return.

    All take ``vocabulary`` and ``experts`` as options, and the fields of ``Layout`` that are no
    tables of rules. Those that split the largest dimension of arrays also take ``min_size``, below
    which an array stays whole, and ``unnamed="largest"``, to split arrays without names, too.
    """

    @classmethod
    def data_parallel(cls, data: MeshAxes = "data", **options: Any) -> Self:
        """Every device holds the whole model and computes its part of the batch.

        Once per step the gradients are summed over the devices (all-reduce).

        Args:
            data: The mesh axis, or axes, over which the batch is split.
            **options: See ``Layout``.

        >>> from penzai_shard.layouts.layout import Layout
        >>> Layout.data_parallel().compute
        AxisRules('batch' -> 'data')
        """
        return cls._preset(options, batch=data)

    @classmethod
    def zero1(cls, data: MeshAxes = "data", **options: Any) -> Self:
        """Data parallel, with the optimizer's state split: stage 1 of ZeRO.

        Each device updates its part of every parameter, and the parts are gathered.

        Source: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054).

        Args:
            data: The mesh axis, or axes, over which batch and optimizer state are split.
            **options: See ``Layout``.

        >>> from penzai_shard.layouts.layout import Layout
        >>> Layout.zero1().optimizer
        AxisRules(largest dimension -> 'data')
        """
        return cls._preset(options, batch=data, optimizer=data)

    @classmethod
    def fully_sharded(cls, data: MeshAxes = "data", **options: Any) -> Self:
        """Parameters, gradients and optimizer state are split, and gathered when they are used.

        Sources: stage 3 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054); PyTorch's FSDP (Zhao
        et al. 2023, arXiv:2304.11277).

        Args:
            data: The mesh axis, or axes, over which batch and parameters are split. Of several,
                each splits a dimension of its own where no dimension divides over all of them.
            **options: See ``Layout``.

        >>> from penzai_shard.layouts.layout import Layout
        >>> Layout.fully_sharded().parameters
        AxisRules(largest dimension -> 'data')
        """
        return cls._preset(options, batch=data, parameters=data)

    @classmethod
    def tensor_parallel(
        cls, data: MeshAxes = "data", model: MeshAxes = "model", **options: Any
    ) -> Self:
        """Each layer's heads and hidden neurons are split, in pairs that need one reduction.

        Attention and feed-forward each reduce their output once in the forward pass, and the
        gradient of their input once in the backward pass.

        Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053).

        Args:
            data: The mesh axis, or axes, over which the batch is split.
            model: The mesh axis, or axes, over which heads, neurons and vocabulary are split.
            **options: See ``Layout``.

        >>> from penzai_shard.layouts.layout import Layout
        >>> Layout.tensor_parallel(vocabulary=None).parameters
        AxisRules('neurons' -> 'model'; 'heads' -> 'model')
        """
        return cls._preset(options, batch=data, model=model)

    @classmethod
    def sequence_parallel(
        cls, data: MeshAxes = "data", model: MeshAxes = "model", **options: Any
    ) -> Self:
        """Tensor parallel, with activations between layers split along the sequence.

        Norms and the residual stream are split, which tensor parallelism has every device compute
        whole. Each reduction becomes a gathering before a layer and a scattering reduction after
        it, which together move as much. The length that the model sees must divide.

        Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
        Models" (arXiv:2205.05198).

        Args:
            data: The mesh axis, or axes, over which the batch is split.
            model: The mesh axis, or axes, over which heads, neurons, vocabulary and the sequence
                are split.
            **options: See ``Layout``.

        >>> from penzai_shard.layouts.layout import Layout
        >>> Layout.sequence_parallel().between_blocks
        AxisRules('batch' -> 'data'; 'seq' -> 'model')
        """
        between = data_parallel(data) | data_parallel(model, "seq")
        return cls._preset(options, batch=data, model=model, between_blocks=between)

    @classmethod
    def two_dimensional(
        cls, data: MeshAxes = "data", model: MeshAxes = "model", **options: Any
    ) -> Self:
        """Fully sharded over one mesh axis, tensor parallel over the other.

        Args:
            data: The mesh axis, or axes, over which batch and parameters are split.
            model: The mesh axis, or axes, over which heads, neurons and vocabulary are split.
            **options: See ``Layout``.

        >>> from penzai_shard.layouts.layout import Layout
        >>> Layout.two_dimensional(vocabulary=None).parameters
        AxisRules('neurons' -> 'model'; 'heads' -> 'model'; largest dimension -> 'data')
        """
        return cls._preset(options, batch=data, model=model, parameters=data)

    @classmethod
    def hybrid(cls, replica: MeshAxes = "replica", data: MeshAxes = "data", **options: Any) -> Self:
        """Fully sharded within a node, copies across nodes.

        Parameters are gathered within a node; gradients are summed over all.

        Source: hybrid sharding of PyTorch's FSDP (Zhao et al. 2023, arXiv:2304.11277).

        Args:
            replica: The mesh axis of the copies, whose devices are far from each other.
            data: The mesh axis over which parameters are split, whose devices are near. The batch
                is split over both.
            **options: See ``Layout``.

        >>> from penzai_shard.layouts.layout import Layout
        >>> Layout.hybrid().compute
        AxisRules('batch' -> ('replica', 'data'))
        """
        axes = [(axis,) if isinstance(axis, str) else tuple(axis or ()) for axis in (replica, data)]
        return cls._preset(options, batch=(*axes[0], *axes[1]), parameters=data)

    @classmethod
    def _preset(
        cls,
        options: dict[str, Any],
        batch: MeshAxes,
        model: MeshAxes = (),
        parameters: MeshAxes = (),
        optimizer: MeshAxes = (),
        **fields: Any,
    ) -> Self:
        """A layout of the mesh axes of a preset.

        Args:
            options: What the preset was called with.
            batch: The mesh axes of the batch.
            model: Those of what layers compute a part of; () for none, and None is a mistake.
            parameters: Those of the largest dimension of parameters, likewise.
            optimizer: Those of the largest dimension of what the optimizer keeps, likewise.
            **fields: Other fields.
        """
        given: dict[str, Any] = {"vocabulary": "auto", "experts": None}
        if parameters or optimizer:
            given |= {"min_size": MIN_SIZE, "unnamed": None}
        problems = Problems("a preset of Layout:")
        if None in (model, parameters, optimizer) or not (batch or model):
            problems.add("", "it splits over a mesh axis, and got None", "Write its name: 'data'.")
        add_unknown(problems, "", options, (*FIELDS, *given))
        problems.raise_if_any(RuleTypeError)
        given |= options
        vocabulary, experts = given.pop("vocabulary"), given.pop("experts")
        sizes = given.pop("min_size", 0), given.pop("unnamed", None)

        # Where both are split over one mesh axis, neurons and heads give way to experts.
        split = AxisRules({} if experts is None else {"experts": experts})
        if vocabulary not in (None, "auto"):
            split |= AxisRules({"vocabulary": vocabulary})
        if model:
            first = ("vocabulary",) if vocabulary == "auto" else ()
            split |= split_axes(model, (*first, "neurons", "heads"))
        return cls(  # type: ignore[call-arg]
            parameters=split | split_largest(parameters, *sizes) if parameters else split,
            compute=data_parallel(batch) | split,
            optimizer=split | split_largest(optimizer, *sizes) if optimizer else None,
            **fields,
            **given,
        )


PRESETS = [name for name in vars(LayoutPresets) if not name.startswith("_")]


def split_largest(axes: MeshAxes, min_size: int = MIN_SIZE, unnamed: Any = None) -> AxisRules:
    """Rules for the largest dimension: over all mesh axes or, if none divides, over each."""
    rules = fully_sharded(axes, min_size, unnamed)
    for axis in rules.rules[0].mesh_axes:
        rules |= fully_sharded(axis, min_size, unnamed)
    return rules

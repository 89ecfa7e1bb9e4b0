"""The layouts of the literature, each in one line."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Self

from penzai_shard.errors import Problems, RuleTypeError
from penzai_shard.paths import nearest
from penzai_shard.rules import AxisRules, MeshAxes, data_parallel, fully_sharded
from penzai_shard.rules import tensor_parallel as split_axes

# What tensor parallelism splits of a layer.
_SPLIT = ("neurons", "heads")
# Arrays with fewer elements, such as the scale of a norm, are not worth gathering.
MIN_SIZE = 2**14
# The fields of a layout that are no tables of rules, and all options of presets.
FIELDS = ("reshard_after_forward", "manual", "rematerialise", "precision", "blocks", "names")
_OPTIONS = (*FIELDS, "vocabulary", "experts", "min_size", "unnamed")


class LayoutPresets:
    """The presets of ``Layout``, which is what they return.

    All take ``vocabulary`` and ``experts`` as options, and the fields of ``Layout`` that are no
    tables of rules.
    """

    @classmethod
    def data_parallel(cls, data: MeshAxes = "data", **options: Any) -> Self:
        """Every device holds the whole model and computes its part of the batch.

        Once per step the gradients are summed over the devices (all-reduce).

        Args:
            data: The mesh axis, or axes, over which the batch is split.
            **options: As for every preset, see ``Layout``.

        >>> from penzai_shard.layouts.layout import Layout
        >>> Layout.data_parallel().compute
        AxisRules('batch' -> 'data')
        """
        return cls._preset(options, None, parameters=AxisRules({}), compute=data_parallel(data))

    @classmethod
    def zero1(cls, data: MeshAxes = "data", *, min_size: int = MIN_SIZE, **options: Any) -> Self:
        """Data parallel, with the optimizer's state split: stage 1 of ZeRO.

        Each device updates its part of every parameter, and the parts are gathered.

        Source: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054).

        Args:
            data: The mesh axis, or axes, over which batch and optimizer state are split.
            min_size: What belongs to parameters with fewer elements stays whole.
            **options: As for every preset, see ``Layout``.

        >>> from penzai_shard.layouts.layout import Layout
        >>> Layout.zero1().optimizer
        AxisRules(largest dimension -> 'data')
        """
        tables = {"parameters": AxisRules({}), "compute": data_parallel(data)}
        return cls._preset(options, None, **tables, optimizer=fully_sharded(data, min_size))

    @classmethod
    def fully_sharded(
        cls,
        data: MeshAxes = "data",
        *,
        min_size: int = MIN_SIZE,
        unnamed: Any = None,
        **options: Any,
    ) -> Self:
        """Parameters, gradients and optimizer state are split, and gathered when they are used.

        Sources: stage 3 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054); PyTorch's FSDP (Zhao
        et al. 2023, arXiv:2304.11277).

        Args:
            data: The mesh axis, or axes, over which batch and parameters are split.
            min_size: Parameters with fewer elements stay whole.
            unnamed: ``"largest"`` to split parameters without names, too.
            **options: As for every preset, see ``Layout``.

        >>> from penzai_shard.layouts.layout import Layout
        >>> Layout.fully_sharded().parameters
        AxisRules(largest dimension -> 'data')
        """
        parameters = fully_sharded(data, min_size, unnamed)
        return cls._preset(options, None, parameters=parameters, compute=data_parallel(data))

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
            **options: As for every preset, see ``Layout``.

        >>> from penzai_shard.layouts.layout import Layout
        >>> Layout.tensor_parallel(vocabulary=None).parameters
        AxisRules('neurons' -> 'model'; 'heads' -> 'model')
        """
        split = split_axes(model, _SPLIT)
        return cls._preset(options, model, parameters=split, compute=data_parallel(data) | split)

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
            **options: As for every preset, see ``Layout``.

        >>> from penzai_shard.layouts.layout import Layout
        >>> Layout.sequence_parallel().between_blocks
        AxisRules('batch' -> 'data'; 'seq' -> 'model')
        """
        between = data_parallel(data) | data_parallel(model, "seq")
        layout = cls.tensor_parallel(data, model, **options)
        return dataclasses.replace(layout, between_blocks=between)  # type: ignore[type-var]

    @classmethod
    def two_dimensional(
        cls,
        data: MeshAxes = "data",
        model: MeshAxes = "model",
        *,
        min_size: int = MIN_SIZE,
        unnamed: Any = None,
        **options: Any,
    ) -> Self:
        """Fully sharded over one mesh axis, tensor parallel over the other.

        Args:
            data: The mesh axis, or axes, over which batch and parameters are split.
            model: The mesh axis, or axes, over which heads, neurons and vocabulary are split.
            min_size: Parameters with fewer elements are not split over ``data``.
            unnamed: As for ``fully_sharded``.
            **options: As for every preset, see ``Layout``.

        >>> from penzai_shard.layouts.layout import Layout
        >>> Layout.two_dimensional(vocabulary=None).parameters
        AxisRules('neurons' -> 'model'; 'heads' -> 'model'; largest dimension -> 'data')
        """
        split = split_axes(model, _SPLIT)
        parameters = split | fully_sharded(data, min_size, unnamed)
        return cls._preset(
            options, model, parameters=parameters, compute=data_parallel(data) | split
        )

    @classmethod
    def hybrid(cls, replica: MeshAxes = "replica", data: MeshAxes = "data", **options: Any) -> Self:
        """Fully sharded within a node, copies across nodes.

        Parameters are gathered within a node; gradients are summed over all.

        Source: hybrid sharding of PyTorch's FSDP (Zhao et al. 2023, arXiv:2304.11277).

        Args:
            replica: The mesh axis of the copies, whose devices are far from each other.
            data: The mesh axis over which parameters are split, whose devices are near. The batch
                is split over both.
            **options: As for ``fully_sharded``.

        >>> from penzai_shard.layouts.layout import Layout
        >>> Layout.hybrid().compute
        AxisRules('batch' -> ('replica', 'data'))
        """
        layout = cls.fully_sharded(data, **options)
        axes = [(axis,) if isinstance(axis, str) else tuple(axis or ()) for axis in (replica, data)]
        compute = data_parallel((*axes[0], *axes[1])) | layout.compute  # type: ignore[attr-defined]
        return dataclasses.replace(layout, compute=compute)  # type: ignore[type-var]

    @classmethod
    def _preset(cls, options: dict[str, Any], model: MeshAxes, **fields: Any) -> Self:
        """A layout of the tables of a preset, and of the options that every preset takes."""
        vocabulary, experts = options.pop("vocabulary", "auto"), options.pop("experts", None)
        # Where both are split over one mesh axis, neurons and heads give way to experts.
        added = AxisRules({}) if experts is None else AxisRules({"experts": experts})
        if vocabulary == "auto" and model is not None:
            added |= split_axes(model, ("vocabulary",))
        elif vocabulary not in (None, "auto"):
            added |= AxisRules({"vocabulary": vocabulary})
        tables = {name: added | fields[name] for name in ("parameters", "compute")}
        if (rules := fields.get("optimizer")) is not None:
            tables["optimizer"] = added | rules
        problems = Problems("a preset of Layout:")
        add_unknown(problems, "", options, _OPTIONS)
        problems.raise_if_any(RuleTypeError)
        return cls(**fields | tables | options)


def add_unknown(problems: Problems, path: str, given: Iterable[Any], known: Iterable[str]) -> None:
    """Collects what is given and not known, with the nearest name."""
    for key in (key for key in given if key not in known):
        near = nearest(str(key), known)
        fix = f"Write {near!r}." if near else f"There are {', '.join(known)}."
        problems.add(path, f"{key!r} is not known", fix)

"""The layouts of the literature, each in one line."""

import abc
from typing import TYPE_CHECKING, Any, Self, Unpack

from penzai_shard.axis_rules import AxisRules
from penzai_shard.layouts.preset_options import MeshAxis, PresetOptions, read_options
from penzai_shard.rule_kinds import nearest_name
from penzai_shard.rule_presets import OfUnnamed, data_parallel, fully_sharded
from penzai_shard.rule_presets import tensor_parallel as split_names

# What tensor parallelism splits.
_SPLIT = ("neurons", "heads")
# Arrays with fewer elements, such as the scale of a norm, are not worth gathering.
MIN_SIZE = 2**14


# What others call the layouts that presets give.
_NAMES_ELSEWHERE = {
    "dp": "data_parallel",
    "ddp": "data_parallel",
    "replicated": "data_parallel",
    "fsdp": "fully_sharded",
    "zero2": "zero1",
    "zero3": "fully_sharded",
    "tp": "tensor_parallel",
    "megatron": "tensor_parallel",
    "model_parallel": "tensor_parallel",
    "sp": "sequence_parallel",
    "fsdp_tp": "two_dimensional",
    "hsdp": "hybrid",
}


class _NamedPresets(abc.ABCMeta):
    """The type of ``Layout``, which says what presets there are where one does not exist.

    A ``Layout`` has the type of abstract classes anyway, as all that notebooks show.
    """

    # Type checkers know that there is none without being told.
    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
            presets = [each for each in vars(LayoutPresets) if not each.startswith("_")]
            near = _NAMES_ELSEWHERE.get(name.lower()) or nearest_name(name, presets)
            meant = f" Write {cls.__name__}.{near}()." if near else ""
            raise AttributeError(
                f"{cls.__name__} has no {name!r}.{meant} There are {', '.join(presets)}, and "
                f"{cls.__name__}(parameters=rules, compute=rules) for any other."
            )


class LayoutPresets(metaclass=_NamedPresets):
    """The presets of ``Layout``, which is what they return.

    All take the options of ``PresetOptions``: ``vocabulary=``, ``experts=``, ``names=``,
    ``blocks=``, ``rematerialise=`` and ``manual=``.
    """

    @classmethod
    def data_parallel(cls, data: MeshAxis = "data", **options: Unpack[PresetOptions]) -> Self:
        """Every device holds the whole model and computes its part of the batch.

        Once per step the gradients are summed over the devices (all-reduce).

        Args:
            data: The mesh axis, or axes, that the batch is split over.
            **options: ``vocabulary``, ``experts``, ``names``, ``blocks``, ``rematerialise`` and
                ``manual``; see ``Layout``.

        >>> from penzai_shard import Layout
        >>> Layout.data_parallel().parameters
        AxisRules({})
        """
        return cls._preset(options, parameters=AxisRules({}), compute=data_parallel(data))

    @classmethod
    def zero1(
        cls,
        data: MeshAxis = "data",
        *,
        min_size: int = MIN_SIZE,
        **options: Unpack[PresetOptions],
    ) -> Self:
        """Data parallel, with the optimizer's state split: stage 1 of ZeRO.

        Each device updates its part of every parameter, and the parts are gathered.

        Source: Rajbhandari et al. 2020, arXiv:1910.02054.

        Args:
            data: The mesh axis, or axes, that batch and optimizer state are split over.
            min_size: What belongs to parameters with fewer elements than this stays whole.
            **options: ``vocabulary``, ``experts``, ``names``, ``blocks``, ``rematerialise`` and
                ``manual``; see ``Layout``.

        >>> from penzai_shard import Layout
        >>> Layout.zero1().optimizer
        fully_sharded('data', min_size=16384)
        """
        return cls._preset(
            options,
            parameters=AxisRules({}),
            compute=data_parallel(data),
            optimizer=fully_sharded(data, min_size),
        )

    @classmethod
    def fully_sharded(
        cls,
        data: MeshAxis = "data",
        *,
        min_size: int = MIN_SIZE,
        unnamed: OfUnnamed = None,
        reshard_after_forward: bool = False,
        **options: Unpack[PresetOptions],
    ) -> Self:
        """Parameters, gradients and optimizer state are split, and gathered when they are used.

        Source: stage 3 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054); PyTorch's FSDP (Zhao
        et al. 2023, arXiv:2304.11277).

        Args:
            data: The mesh axis, or axes, that batch and parameters are split over.
            min_size: Parameters with fewer elements than this stay whole.
            unnamed: ``"largest"`` for parameters without names too; see ``fully_sharded`` rules.
            reshard_after_forward: Gather again in the backward pass, so that no gathered parameter
                has to be kept: half as much again is moved. When gathers happen is up to the
                compiler's schedule; in a rolled stack of layers it is one layer at a time. By
                default the compiler may keep what is gathered.
            **options: ``vocabulary``, ``experts``, ``names``, ``blocks``, ``rematerialise`` and
                ``manual``; see ``Layout``.

        >>> from penzai_shard import Layout
        >>> Layout.fully_sharded(min_size=1).parameters
        fully_sharded('data', min_size=1)
        """
        return cls._preset(
            options,
            parameters=fully_sharded(data, min_size, unnamed),
            compute=data_parallel(data),
            reshard_after_forward=reshard_after_forward,
        )

    @classmethod
    def tensor_parallel(
        cls,
        data: MeshAxis = "data",
        model: MeshAxis = "model",
        **options: Unpack[PresetOptions],
    ) -> Self:
        """Each layer's heads and hidden neurons are split, in pairs that need one reduction.

        Attention and feed-forward each reduce their output once in the forward pass, and the
        gradient of their input once in the backward pass. Heads of keys and values that are too
        few to be split are copied, in grouped-query and multi-query attention.

        Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053).

        Args:
            data: The mesh axis, or axes, that the batch is split over.
            model: The mesh axis, or axes, that heads and neurons are split over.
            **options: ``vocabulary``, ``experts``, ``names``, ``blocks``, ``rematerialise`` and
                ``manual``; see ``Layout``.

        >>> from penzai_shard import Layout
        >>> layout = Layout.tensor_parallel()
        >>> layout.compute.spec(("batch", "neurons"), (8, 8), {"data": 4, "model": 2})
        P('data', 'model')
        """
        split = split_names(model, _SPLIT)
        return cls._preset(options, _SPLIT, parameters=split, compute=data_parallel(data) | split)

    @classmethod
    def sequence_parallel(
        cls,
        data: MeshAxis = "data",
        model: MeshAxis = "model",
        **options: Unpack[PresetOptions],
    ) -> Self:
        """Tensor parallel, with activations between layers split along the sequence.

        Norms and the residual stream, which tensor parallelism has every device compute whole,
        are split. Each reduction becomes a gathering before a layer and a scattering reduction
        after it, which together move as much. The length that the model sees must divide; that
        of the batch need not, as inputs are not split along the sequence.

        Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
        Models" (arXiv:2205.05198).

        Args:
            data: The mesh axis, or axes, that the batch is split over.
            model: The mesh axis, or axes, that heads, neurons and the sequence are split over.
            **options: ``vocabulary``, ``experts``, ``names``, ``blocks``, ``rematerialise`` and
                ``manual``; see ``Layout``.

        >>> from penzai_shard import Layout
        >>> layout = Layout.sequence_parallel()
        >>> layout.between_blocks.spec(("batch", "seq"), (8, 8), {"data": 4, "model": 2})
        P('data', 'model')
        """
        split = split_names(model, _SPLIT)
        return cls._preset(
            options,
            _SPLIT,
            parameters=split,
            compute=data_parallel(data) | split,
            between_blocks=data_parallel(data) | split_names(model, ("seq",)),
        )

    @classmethod
    def two_dimensional(
        cls,
        data: MeshAxis = "data",
        model: MeshAxis = "model",
        *,
        min_size: int = MIN_SIZE,
        unnamed: OfUnnamed = None,
        reshard_after_forward: bool = False,
        **options: Unpack[PresetOptions],
    ) -> Self:
        """Fully sharded over one mesh axis, tensor parallel over the other.

        Args:
            data: The mesh axis, or axes, that batch and parameters are split over.
            model: The mesh axis, or axes, that heads and neurons are split over.
            min_size: Parameters with fewer elements than this are not split over ``data``.
            unnamed: ``"largest"`` for parameters without names too; see ``fully_sharded`` rules.
            reshard_after_forward: As for ``fully_sharded``.
            **options: ``vocabulary``, ``experts``, ``names``, ``blocks``, ``rematerialise`` and
                ``manual``; see ``Layout``.

        >>> from penzai_shard import Layout
        >>> layout = Layout.two_dimensional(min_size=1)
        >>> layout.parameters.spec(("embedding", "neurons"), (8, 8), {"data": 4, "model": 2})
        P('data', 'model')
        """
        split = split_names(model, _SPLIT)
        return cls._preset(
            options,
            _SPLIT,
            parameters=split | fully_sharded(data, min_size, unnamed),
            compute=data_parallel(data) | split,
            reshard_after_forward=reshard_after_forward,
        )

    @classmethod
    def hybrid(
        cls,
        replica: str = "replica",
        data: MeshAxis = "data",
        *,
        min_size: int = MIN_SIZE,
        unnamed: OfUnnamed = None,
        reshard_after_forward: bool = False,
        **options: Unpack[PresetOptions],
    ) -> Self:
        """Fully sharded within a node, copies across nodes.

        Parameters are gathered within a node alone; gradients are summed over all.

        Source: hybrid sharding of PyTorch's FSDP (Zhao et al. 2023, arXiv:2304.11277).

        Args:
            replica: The mesh axis of the copies, whose devices are far from each other.
            data: The mesh axis that parameters are split over, whose devices are near. The batch
                is split over both.
            min_size: Parameters with fewer elements than this stay whole.
            unnamed: ``"largest"`` for parameters without names too; see ``fully_sharded`` rules.
            reshard_after_forward: As for ``fully_sharded``.
            **options: ``vocabulary``, ``experts``, ``names``, ``blocks``, ``rematerialise`` and
                ``manual``; see ``Layout``.

        >>> from penzai_shard import Layout
        >>> Layout.hybrid().compute
        AxisRules({'batch': ('replica', 'data')})
        """
        axes = (data,) if isinstance(data, str) else data
        return cls._preset(
            options,
            parameters=fully_sharded(data, min_size, unnamed),
            compute=data_parallel((replica, *axes)),
            reshard_after_forward=reshard_after_forward,
        )

    @classmethod
    def _preset(
        cls,
        options: PresetOptions,
        wanted: tuple[str, ...] = (),
        *,
        reshard_after_forward: bool = False,
        **tables: AxisRules,
    ) -> Self:
        arguments = read_options(tables, options, wanted)
        return cls(**arguments | {"reshard_after_forward": reshard_after_forward})

"""Says what each logical axis of a traced call is for, and calls it that."""

from penzai_shard.naming.axis_names import AxisNames
from penzai_shard.naming.facts import Facts


def name_classes(facts: Facts) -> AxisNames:
    """What the classes of a call are called, with reasons."""
    names = AxisNames()
    for weight in facts.call.weights:
        for parts, name in zip(weight.parts, weight.names, strict=False):
            if name is not None and len(parts) == 1:
                names.call(parts[0], name, f"{weight.path} has that name already")
    return names

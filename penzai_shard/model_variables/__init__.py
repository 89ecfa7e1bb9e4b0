"""A model's variables: what they are, taking them out, putting values back, of either API."""

from penzai_shard.model_variables.bound_model import BoundModel
from penzai_shard.model_variables.splitting import (
    TrainablePredicate,
    VariableTable,
    held_by_templates,
    split_model,
)
from penzai_shard.model_variables.variable_entries import VariableEntry
from penzai_shard.model_variables.variables import (
    is_copy,
    is_parameter,
    is_variable,
    problem_of,
    thawed,
    value_of,
    variable_name,
    with_own_label,
    with_value,
)

__all__ = [
    "BoundModel",
    "TrainablePredicate",
    "VariableEntry",
    "VariableTable",
    "held_by_templates",
    "is_copy",
    "is_parameter",
    "is_variable",
    "problem_of",
    "split_model",
    "thawed",
    "value_of",
    "variable_name",
    "with_own_label",
    "with_value",
]

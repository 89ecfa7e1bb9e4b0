"""A file of rules, explained; ``penzai-shard rules --example`` prints it."""

EXAMPLE = """\
# How a model is laid out over a mesh. Use it so:
#   penzai-shard plan llama-3-8b --mesh data=8,model=4 --rules rules.toml
# or in Python: layout = pzs.Layout.from_toml("rules.toml")

# Either one of the layouts of the literature, with its options; others are data_parallel, zero1,
# fully_sharded, tensor_parallel, sequence_parallel and hybrid:
#
#   layout = "two_dimensional(min_size=16384, vocabulary='model')"
#
# or rules of your own, in tables, as follows.

# How parameters and their gradients are stored. Each line is: logical axis = mesh axis. A list
# splits an axis over several mesh axes, and an empty list leaves it whole. "heads" means what the
# model has: heads, or head_groups and query_heads in grouped-query attention.
[parameters]
vocabulary = "model"
neurons = "model"
heads = "model"
embedding = "data"
projection = []

# How activations are laid out while layers compute. If it is left out: the rules above, without
# those that would take the mesh axis of the batch.
[compute]
batch = "data"
neurons = "model"
heads = "model"
vocabulary = "model"

# How the optimizer's state is stored; if it is left out, as the parameters.
#
#   [optimizer]
#   embedding = ["data", "model"]
#
# Where the order counts, or one logical axis has several rules, a table is written as a list of
# pairs and of rules as code has them. Of each array, the first rule that fits wins:
#
#   parameters = [
#     ["heads", "model"],
#     ["heads", "data"],
#     "tensor_parallel(axes=('neurons', 'vocabulary'))",
#     "fully_sharded('data', min_size=16384)",
#   ]
#
# More that can be said, here with what is meant if it is left out:
#
#   rematerialise = "nothing"      # what blocks keep for the backward pass; left out: all
#   reshard_after_forward = false  # gather parameters again in the backward pass
#   manual = false                 # blocks run per device, with jax.shard_map
#   blocks = []                    # leave activations between layers to the compiler
#
# A file may say the rest of a step too, as those of choose_layout do; --mesh, --microbatches
# and --on-indivisible are then left out:
#
#   mesh = { data = 8, model = 4 }
#   microbatches = 2               # parts of a batch, one after the other
#   on_indivisible = "pad"         # store padded what does not divide; left out: an error
#
#   [names]                        # what the model calls its axes, if not as Penzai's transformers
#   neurons = "mlp"
"""
"""A file that reads, with all that may be in one."""

"""A few steps under each preset, made once, and all that tests look at."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from penzai import pz

from penzai_shard import Layout, make_mesh
from tests.compiled_buffers import compiled_programs, text_of_running
from tests.model_families import transformer

# Nothing that a device computes has as many elements as a parameter of several dimensions, nor has
# a part of another parameter.
build_model = functools.partial(
    transformer,
    "llama",
    num_decoder_blocks=1,
    embedding_dim=40,
    mlp_hidden_dim=56,
    vocab_size=88,
    query_head_multiplier=3,
    projection_dim=6,
)
TOKENS = pz.nx.wrap(jnp.arange(8 * 9).reshape(8, 9) % 88, "batch", "seq")

LAYOUTS = {
    "one device": (Layout.data_parallel(), {"data": 1}),
    "data_parallel": (Layout.data_parallel(), {"data": 8}),
    "zero1": (Layout.zero1(min_size=64), {"data": 8}),
    "fully_sharded": (Layout.fully_sharded(min_size=64), {"data": 8}),
    "fully_sharded, gathered again": (
        Layout.fully_sharded(min_size=64, reshard_after_forward=True),
        {"data": 8},
    ),
    "tensor_parallel": (Layout.tensor_parallel(), {"data": 4, "model": 2}),
    "sequence_parallel": (
        Layout.sequence_parallel(vocabulary="model"),
        {"data": 4, "model": 2},
    ),
    "two_dimensional": (Layout.two_dimensional(min_size=64), {"data": 4, "model": 2}),
    "hybrid": (Layout.hybrid(min_size=64), {"replica": 2, "data": 4}),
}
PRESETS = tuple(LAYOUTS)[1:]
# Those that split a parameter, or what the optimizer keeps of it, in a way of their own.
SPLIT = ("zero1", "fully_sharded", "tensor_parallel", "two_dimensional", "hybrid")


def mesh_of(shape):
    """A mesh of the first devices."""
    return make_mesh(shape, jax.devices()[: int(np.prod(list(shape.values())))])


def loss_fn(model, rng, state, tokens):
    logits = model(tokens[{"seq": pz.slice[:-1]}])
    log_probs = pz.nx.nmap(jax.nn.log_softmax)(logits.untag("vocabulary")).tag("vocabulary")
    right = log_probs[{"vocabulary": tokens[{"seq": pz.slice[1:]}]}]
    loss = -right.untag("batch", "seq").mean().unwrap()
    return loss, state, {"loss": loss}


class Run:
    """Three steps under a preset.

    Attributes:
        layout: The preset.
        mesh: Its mesh.
        start: The initial value of every parameter.
        losses: The loss of each step.
        state: The state after the last step.
        compilations: How many programs were compiled in each step.
        initialising: The texts of the programs that made the first state, of those in ``SPLIT``.
        step: The text of the step's program.
    """

    def __init__(self, name):
        self.layout, shape = LAYOUTS[name]
        self.mesh = mesh_of(shape)
        reading = compiled_programs() if name in SPLIT else contextlib.nullcontext([])
        with reading as self.initialising:
            state, step = self.layout.build(
                build_model,
                jax.random.key(0),
                mesh=self.mesh,
                loss_fn=loss_fn,
                optimizer=optax.adamw(1e-2),
                rng=jax.random.key(1),
            )
        self.start = {label: np.asarray(x.data_array) for label, x in state.params.items()}
        self.losses, self.compilations = [], []
        for _ in range(3):
            with compilations() as counted:
                state, aux = step(state, tokens=self.layout.shard_batch(TOKENS, self.mesh))
                self.losses.append(float(aux["loss"]))
            self.compilations.append(len(counted))
        self.state = state
        self.step = text_of_running("jit_train_step")

    def split_over(self, *mesh_axes):
        """The shapes of the parameters that some mesh axis splits."""
        return [
            x.data_array.shape
            for x in self.state.params.values()
            if set(mesh_axes) & set(jax.tree.leaves(tuple(x.data_array.sharding.spec)))
        ]


class compilations:
    """Counts the programs that are compiled in a block of code."""

    def __enter__(self):
        self.found = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self.found

    def _listen(self, event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            self.found.append(event)

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)


@functools.cache
def run(name):
    """The run of a preset, the same every time."""
    return Run(name)

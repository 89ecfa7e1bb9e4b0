"""What the processes of a job do with arrays that are stored padded."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import treescope

import penzai_shard as pzs


def claims(folder):
    """What of padding this process has judged by the parts that it has, and how many it has."""
    # Not before there are devices, which its meshes are made of.
    from tests import padding_claims as of

    folder = pathlib.Path(folder)
    values = of.TRUE | {"rows": np.arange(72, dtype=np.float32).reshape(9, 8)}
    judged = {}

    def judge(name, tree, mesh=of.MESH, values=values):
        for each, true in values.items():
            of.assert_stored(tree[each], true, of.SPLIT[each], mesh)
            assert tuple(tree[each].named_shape.values()) == true.shape
        judged[name] = {len(tree[each].stored.addressable_shards) for each in values}.pop()

    placed = of.placed(values=values)
    judge("placed", placed)
    of_jax = jax.tree.map(jnp.asarray, of.plain(values))
    judge("arrays of JAX", pzs.place(of_jax, of.MESH, of.RULES, on_indivisible="pad"))
    judge("moved", pzs.place(placed, of.OTHER, of.RULES, on_indivisible="pad"), of.OTHER)
    judge(
        "initialised",
        pzs.sharded_init(
            lambda: jax.tree.map(jnp.asarray, of.plain(values)),
            mesh=of.MESH,
            rules=of.RULES,
            on_indivisible="pad",
        ),
    )
    pzs.save_params(folder / "padded", placed)
    pzs.save_safetensors(folder / "weights", placed)
    for mesh in (of.MESH, of.OTHER):
        options = {"on_indivisible": "pad"}
        read = pzs.restore_params(folder / "padded", placed, mesh, of.RULES, **options)
        judge("restored", read, mesh)
        read = pzs.load_safetensors(folder / "weights", mesh, of.RULES, into=placed, **options)
        judge("loaded", read, mesh)
    state, losses = of.state_of(of.placed()), []
    step = pzs.build_train_step_fn(of.loss_fn, donate_params_and_state=True)
    for _ in range(2):
        state, aux = step(state, x=of.batch())
        losses.append(float(aux["loss"]))
    expected, trained, momenta = of.by_hand(2)
    of.close(losses, expected, "losses")
    judge("trained", state.params, values=trained)
    judge("its momenta", state.opt_state[3].trace, values=momenta)
    pzs.save_train_state(folder / "state", state)
    again = pzs.restore_train_state(
        folder / "state", state, of.OTHER, of.RULES, on_indivisible="pad"
    )
    judge("its state", again.params, of.OTHER, trained)
    return judged | {"shown": treescope.render_to_text(placed["weights"])}

"""Draws the pictures of README and docs: ``python docs/images/draw.py``, which needs chromium.

The objects are those of the first blocks of README.md, run here, so that picture and code agree.
"""

import contextlib
import functools
import io
import os
import pathlib
import re
import subprocess
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import treescope
from treescope import layout_algorithms

import penzai_shard as pzs

FOLDER = pathlib.Path(__file__).parent
STYLE = "<style>body { margin: 12px 16px; zoom: 1.45; background: white; }</style>"


def readme_objects(blocks: int) -> dict:
    """What the first blocks of README define."""
    text = (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    namespace: dict = {}
    for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)[:blocks]:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, namespace)
    return namespace


def draw(name: str, value: object, depth: int, height: int) -> None:
    """Writes ``name``.png, ``height`` pixels high: treescope's view, open down to ``depth``."""
    expand = functools.partial(layout_algorithms.expand_to_depth, depth=depth)
    with treescope.active_expansion_strategy.set_scoped(expand):
        page = treescope.render_to_html(value, compressed=False)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "page.html")
        path.write_text(f"{STYLE}{page}", encoding="utf-8")
        subprocess.run(
            [
                "chromium",
                "--headless=new",
                "--no-sandbox",
                "--hide-scrollbars",
                f"--window-size=1400,{height}",
                f"--screenshot={FOLDER / name}.png",
                "--virtual-time-budget=5000",
                path.as_uri(),
            ],
            check=True,
            capture_output=True,
        )


if __name__ == "__main__":
    objects = readme_objects(1)
    model, mesh, rules = (objects[name] for name in ("model", "mesh", "rules"))
    draw("model", pzs.Jitted(model), 4, 445)
    draw("plan", pzs.make_plan(pzs.param_dict(model), mesh, rules), 4, 500)

"""Meshes as a shell can say them."""

from penzai_shard.errors import MeshError


def mesh_shape(text: str) -> dict[str, int]:
    """Reads a mesh from the command line.

    Args:
        text: For instance ``data=4,model=2``.

    Returns:
        The size of each mesh axis by name.

    Raises:
        MeshError: The text cannot be read as that.

    >>> mesh_shape("data=4,model=2")
    {'data': 4, 'model': 2}
    """
    shape: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not name or not (size.isascii() and size.isdigit()) or int(size) < 1:
            raise MeshError(f"cannot read mesh {text!r}: write for instance data=4,model=2.")
        if name in shape:
            raise MeshError(f"mesh {text!r} has the mesh axis {name!r} twice. Give it once.")
        shape[name] = int(size)
    return shape
